"""The server's HTTP interface: LibreTranslate's endpoints, scores, attention, health, metrics and the page."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from jax import monitoring
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .batching import Batcher, QueueFullError
from .documents import Document
from .engine import Engine, Task, Translated
from .metrics import Metrics
from .requests import PAIRS, TRANSLATE, Limits, RequestError, parse, texts_of, within

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BODY_SECONDS = 30.0  # in which a body must arrive
_DRAINED = 64 << 20  # bytes of a body that is too large which are read, so that the client reads the answer
_PAGE = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_Results = AsyncGenerator[tuple[int, Any], None]  # (index, result) of items as they are computed


class Service(NamedTuple):
    """What answers requests."""

    name: str  # of the model
    engine: Engine
    batcher: Batcher
    metrics: Metrics
    limits: Limits
    token: str | None  # that each request must have; None: none
    hosts: Sequence[str] | None  # names by which the server is addressed; None: any

    @classmethod
    def of(
        cls,
        name: str,
        engine: Engine,
        limits: Limits,
        window: float = 0.005,
        capacity: int = 10_000,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
    ) -> "Service":
        """A service whose batcher waits `window` seconds for requests, and at most `capacity` sentences."""
        batcher = Batcher(engine.compute, window, capacity)
        metrics = Metrics(lambda: batcher.waiting)
        batcher.observe = metrics.observe_round
        return cls(name, engine, batcher, metrics, limits, token, hosts)


class _Documents(NamedTuple):
    """The texts of a request for translations."""

    documents: list[Document]
    is_list: bool
    alternatives: int
    task: Task

    def assembled(self, sentences: Sequence[Translated], rank: int) -> list[str]:
        """The translated texts, with the translation of this rank of each sentence, or the last that it has."""
        lines, texts = iter(sentences), []
        for document in self.documents:
            translations = [_line(next(lines), rank) for _ in document.sentences]
            texts.append(document.text(translations))
        return texts


def application(service: Service) -> ASGIApp:
    """The ASGI application; the batcher ends with it."""
    endpoints = _Endpoints(service)
    routes = [
        Route("/translate", endpoints.translate, methods=["POST"]),
        Route("/score", endpoints.score, methods=["POST"]),
        Route("/attention", endpoints.attention, methods=["POST"]),
        Route("/languages", endpoints.languages),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/", endpoints.page),
        *(Route(f"/{name}", endpoints.page) for name in _PAGE if name != "page.html"),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        monitoring.register_event_duration_secs_listener(service.metrics.observe_event)
        yield
        monitoring.unregister_event_duration_listener(service.metrics.observe_event)
        await asyncio.to_thread(service.batcher.close)

    app = Starlette(routes=routes, exception_handlers=_error_handlers(service.metrics), lifespan=lifespan)
    return _Guard(app, service, {route.path for route in routes})


class _Endpoints:
    """One method per path."""

    def __init__(self, service: Service):
        self._service = service
        self._directions = service.engine.directions

    async def translate(self, request: Request) -> Response:
        """Translate texts, sentence by sentence: all at once, or as server-sent events."""
        values = await self._fields(request, TRANSLATE)
        asked = await asyncio.to_thread(self._documents, values)
        sentences = [sentence for document in asked.documents for sentence in document.sentences]
        items = [(sentence, i) for i, sentence in enumerate(sentences)]
        if values.get("stream", False):
            results = await self._submitted(asked.task, items)
            return StreamingResponse(self._events(asked, results), media_type="text/event-stream", headers=_NO_STORE)
        translated = await self._all(request, asked.task, items)
        texts = asked.assembled(translated, 0)
        answer: dict[str, Any] = {"translatedText": texts if asked.is_list else texts[0]}
        if asked.alternatives:
            others = [*zip(*(asked.assembled(translated, i + 1) for i in range(asked.alternatives)), strict=True)]
            answer["alternatives"] = others if asked.is_list else others[0]
        if warnings := [_truncation(i) for i, sentence in enumerate(translated) if sentence.truncated]:
            answer["warnings"] = warnings
        return JSONResponse(answer)

    async def score(self, request: Request) -> Response:
        """The log-probability of each translation in nats."""
        scores = await self._pairs(request, "score")
        return JSONResponse({"scores": scores})

    async def attention(self, request: Request) -> Response:
        """The attention weights between the words of each sentence and its translation."""
        return JSONResponse({"attention": await self._pairs(request, "attention")})

    async def languages(self, request: Request) -> Response:
        """The languages, as LibreTranslate lists them."""
        directions = self._directions
        codes = dict.fromkeys((*directions.sources, *directions.targets))
        targets = {code: directions.targets if code in directions.sources else () for code in codes}
        listed = [{"code": code, "name": code, "targets": [t for t in targets[code] if t != code]} for code in codes]
        return JSONResponse(listed)

    async def health(self, request: Request) -> Response:
        """Whether the server answers, and with which model and settings."""
        limits, directions = self._service.limits, self._directions
        answer = {"status": "ok", "model": self._service.name, "limits": vars(limits)}
        return JSONResponse(answer | {"source": directions.source, "target": directions.target})

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """The page, or a file of it."""
        name = request.url.path.removeprefix("/") or "page.html"
        content = Path(__file__).with_name(name).read_bytes()
        return Response(content, media_type=_PAGE[name], headers=_PAGE_HEADERS)

    def _documents(self, values: Mapping[str, Any]) -> _Documents:
        """The texts to translate. Raises: RequestError, DataError, ConfigError."""
        texts, limits, engine = texts_of(values, "q"), self._service.limits, self._service.engine
        source, target = self._directions.pair(values.get("source"), values.get("target"))
        if values.get("format", "text") != "text":
            raise RequestError(400, f"format={values['format']!a}: must be 'text'; markup would be translated as text")
        beam_size = within("beam_size", values.get("beam_size", engine.decoding.beam_size), 1, limits.beam_size)
        hint = ", one less than the beam size"
        alternatives = within("alternatives", values.get("alternatives", 0), 0, beam_size - 1, hint)
        replace(engine.decoding, beam_size=beam_size, n_best=beam_size)
        language = source if values.get("split_sentences", True) else None
        documents = [Document.of(text, language) for text in texts]
        if (number := sum(len(document.sentences) for document in documents)) > limits.sentences:
            raise RequestError(413, f"q: has {number:,} sentences; at most {limits.sentences:,} are translated at once")
        task = Task("translate", source, target, beam_size)
        return _Documents(documents, not isinstance(values["q"], str), alternatives, task)

    async def _pairs(self, request: Request, kind: str) -> list[Any]:
        """The results for pairs of a source and a translation."""
        values = await self._fields(request, PAIRS)
        sources, translations = texts_of(values, "q"), texts_of(values, "translation")
        if len(sources) != len(translations):
            raise RequestError(
                400, f"q and translation: have {len(sources)} and {len(translations)} texts, not as many"
            )
        within("the number of texts", len(sources), 0, self._service.limits.sentences)
        pair = self._directions.pair(values.get("source"), values.get("target"))
        return await self._all(request, Task(kind, *pair), [*zip(sources, translations, strict=True)])

    async def _fields(self, request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the body. Raises: RequestError, also if the token is missing."""
        values = parse(
            await _body(request, self._service.limits.bytes), request.headers.get("content-type", ""), fields
        )
        _check_token(self._service.token, request.headers.get("authorization"), values.get("api_key"))
        return values

    async def _submitted(self, task: Task, items: Sequence[Any]) -> _Results:
        """(index, result) of each item as it is computed; what is not started is cancelled when the iterator closes."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()
        batcher = self._service.batcher

        def deliver(index: int, result: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (index, result))

        submitted = batcher.submit(task, items, deliver)

        async def results() -> _Results:
            try:
                for _ in items:
                    index, result = await queue.get()
                    if isinstance(result, Exception):
                        raise _item_error(index, result)
                    yield index, Translated([], False) if result is None else result
            finally:
                batcher.cancel(submitted)

        return results()

    async def _all(self, request: Request, task: Task, items: Sequence[Any]) -> list[Any]:
        """The result of each item. Raises: ClientDisconnect."""
        submitted = await self._submitted(task, items)

        async def collect() -> dict[int, Any]:
            return {index: result async for index, result in submitted}

        results = await _unless_left(request, collect())
        if task.kind == "translate":
            self._service.metrics.sentences.inc(len(items))
        return [results[i] for i in range(len(items))]

    async def _events(self, asked: _Documents, results: _Results) -> AsyncIterator[str]:
        """Server-sent events: each sentence in order, then the end, or an error."""
        places = [(t, i) for t, document in enumerate(asked.documents) for i in range(len(document.sentences))]
        finished: dict[int, Translated] = {}
        lines: list[list[str]] = [[] for _ in asked.documents]
        done = 0
        try:
            async for index, result in results:
                finished[index] = result
                while done in finished:
                    (t, i), sentence = places[done], finished.pop(done)
                    document = asked.documents[t]
                    lines[t].append(_line(sentence, 0))
                    event: dict[str, Any] = {"text": t, "sentence": i, "source": document.sentences[i]}
                    event |= {"separator": document.separator(i, lines[t]), "translatedText": lines[t][-1]}
                    event["scores"] = [hypothesis.score for hypothesis in sentence.hypotheses[: asked.alternatives + 1]]
                    event["alternatives"] = [h.line for h in sentence.hypotheses[1 : asked.alternatives + 1]]
                    event |= {"warning": _truncation(i)} if sentence.truncated else {}
                    done += 1
                    self._service.metrics.sentences.inc()
                    yield _event("sentence", event)
            yield _event("end", {"separators": [document.separators[-1] for document in asked.documents]})
        except ValueError as error:
            yield _event("error", {"error": str(error)})
        except Exception as error:
            yield _event("error", {"error": f"a defect of twinax: {type(error).__name__}"})
        except BaseException:  # the client left
            self._service.metrics.left.inc()
            raise
        finally:
            await results.aclose()


_NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _event(name: str, data: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _line(sentence: Translated, rank: int) -> str:
    hypotheses = sentence.hypotheses
    return hypotheses[min(rank, len(hypotheses) - 1)].line if hypotheses else ""


def _truncation(i: int) -> str:
    return f"sentence {i + 1}: has more tokens than the model reads and was truncated"


def _item_error(index: int, error: Exception) -> Exception:
    """The exception of an item, with its number; it was computed alone, as the first."""
    if isinstance(error, ValueError):
        return RequestError(400, f"item {index + 1}: {str(error).removeprefix('pair 1: ')}")
    return error


async def _body(request: Request, limit: int) -> bytes:
    """The body. Raises: RequestError if it is too large or too slow, ClientDisconnect."""
    too_large = RequestError(413, f"the body has more than {limit:,} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit and (int(declared) > _DRAINED or "expect" in request.headers):
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                if size > _DRAINED:
                    break
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} seconds") from None
    if size > limit:
        raise too_large
    return b"".join(chunks)


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled if the client leaves. Raises: ClientDisconnect."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_token(expected: str | None, authorization: str | None, key: str | None = None) -> None:
    """Raises: RequestError if the token is another one."""
    if expected is None:
        return
    given = key if key is not None else (authorization or "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(errors="replace"), expected.encode()):
        raise RequestError(403, "the token is missing or wrong; send it as api_key or as Authorization: Bearer TOKEN")


class _Guard:
    """Checks host and token, and measures requests."""

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]):
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, request = time.monotonic(), 499, Request(scope)

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            host = request.url.hostname
            if self._service.hosts is not None and host not in self._service.hosts:
                raise RequestError(421, f"Host {host!a}: the server answers to {', '.join(LOOPBACK)}")
            if path == "/metrics":
                _check_token(self._service.token, request.headers.get("authorization"))
        except RequestError as error:
            await _error(error.status, str(error))(scope, receive, observed)
        else:
            await self._app(scope, receive, observed)
        known = path if path in self._paths else "other"
        self._service.metrics.observe_request(known, status, time.monotonic() - begin)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def _error_handlers(metrics: Metrics) -> Any:
    """The answer to each kind of exception."""

    def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:100]
        message = {404: f"there is no {path!a}", 405: f"{path}: does not take {request.method}"}.get(error.status_code)
        return _error(error.status_code, message or error.detail, error.headers)

    def value_error(request: Request, error: ValueError) -> Response:
        if isinstance(error, RequestError):
            return _error(error.status, str(error))
        if type(error).__module__.startswith("twinax."):
            return _error(400, str(error))
        raise error

    def queue_full(request: Request, error: QueueFullError) -> Response:
        return _error(503, str(error), {"Retry-After": str(max(ceil(error.seconds), 1))})

    def client_left(request: Request, error: ClientDisconnect) -> Response:
        metrics.left.inc()
        return Response(status_code=499)  # nobody reads it

    def defect(request: Request, error: Exception) -> Response:
        return _error(500, f"a defect of twinax: {type(error).__name__}")

    handlers = {HTTPException: http_error, ValueError: value_error, QueueFullError: queue_full}
    return handlers | {ClientDisconnect: client_left, Exception: defect}
