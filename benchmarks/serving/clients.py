"""Many clients of a server at once: most want translations, the others send what is wrong, or leave."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2

_TIMEOUT = 120.0
_LARGE = b'{"q": "' + b"a" * 10_000_000 + b'"}'


@dataclass
class Record:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)  # by kind of request
    refused: int = 0  # with 503: asked again
    wrong: list[str] = field(default_factory=list)  # answers that are not the expected ones
    lost: list[str] = field(default_factory=list)  # requests without an answer
    seconds: list[float] = field(default_factory=list)  # of each single sentence, with those in which it was refused
    sentences: int = 0


@dataclass
class Clients:
    """Clients that send one request after the other."""

    address: str
    sources: Sequence[str]
    translations: Sequence[str] | None  # what must be answered; None: anything
    record: Record = field(default_factory=Record)

    async def run(self, number: int, seconds: float, only_valid: bool = False) -> Record:
        """Send requests for some time; wait for the last answers."""
        self._end = time.monotonic() + seconds
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.address, timeout=_TIMEOUT, limits=limits) as self._http:
            await asyncio.gather(*(self._client(i, only_valid) for i in range(number)))
        return self.record

    async def _client(self, number: int, only_valid: bool) -> None:
        rng = random.Random(number)
        kinds = {self._sentence: 60}
        if not only_valid:
            kinds |= {self._document: 10, self._stream: 5, self._wrong_json: 5, self._wrong_language: 5}
            kinds |= {self._large: 1, self._half_open: 5, self._leaving: 9}
        while time.monotonic() < self._end:
            (kind,) = rng.choices([*kinds], [*kinds.values()])
            name = kind.__name__.removeprefix("_")
            try:
                await kind(rng)
                self.record.answers[name] += 1
            except (httpx2.HTTPError, OSError, asyncio.IncompleteReadError) as error:
                self.record.lost.append(f"{name}: {type(error).__name__}: {error}")

    async def _sentence(self, rng: random.Random) -> None:
        begin = time.monotonic()
        await self._translated(rng, 1)
        self.record.seconds.append(time.monotonic() - begin)

    async def _document(self, rng: random.Random) -> None:
        await self._translated(rng, 5)

    async def _translated(self, rng: random.Random, number: int) -> None:
        rows = [rng.randrange(len(self.sources)) for _ in range(number)]
        body = {"q": "\n".join(self.sources[i] for i in rows), "split_sentences": False}
        while (response := await self._http.post("/translate", json=body)).status_code == 503:
            self.record.refused += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        self._check(response.json().get("translatedText", response.text), rows)

    async def _stream(self, rng: random.Random) -> None:
        rows = [rng.randrange(len(self.sources)) for _ in range(3)]
        body = {"q": "\n".join(self.sources[i] for i in rows), "split_sentences": False, "stream": True}
        while (response := await self._http.post("/translate", json=body)).status_code == 503:
            self.record.refused += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if "data:" in line[:5]]
        self._check("".join(e["separator"] + e["translatedText"] for e in events[:-1]), rows)

    def _check(self, text: str, rows: Sequence[int]) -> None:
        self.record.sentences += len(rows)
        if self.translations is not None and text != (expected := "\n".join(self.translations[i] for i in rows)):
            self.record.wrong.append(f"{text!r}, not {expected!r}")

    async def _wrong_json(self, rng: random.Random) -> None:
        self._expect(await self._http.post("/translate", content=b'{"q": ["a", '), 400)

    async def _wrong_language(self, rng: random.Random) -> None:
        self._expect(await self._http.post("/translate", json={"q": "a", "source": "xx"}), 400)

    async def _large(self, rng: random.Random) -> None:
        self._expect(await self._http.post("/translate", content=_LARGE), 413)

    def _expect(self, response: httpx2.Response, status: int) -> None:
        if response.status_code != status or "error" not in response.json():
            self.record.wrong.append(f"{response.status_code}, not {status}: {response.text[:200]}")

    async def _half_open(self, rng: random.Random) -> None:
        place = urlsplit(self.address)
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 3))
        writer.transport.abort()

    async def _leaving(self, rng: random.Random) -> None:
        body = {"q": "\n".join(rng.choices(self.sources, k=20))}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._http.post("/translate", json=body), rng.uniform(0, 0.5))
