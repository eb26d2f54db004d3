"""A server on a thread of this process, and a browser."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from twinax.inference.serving import server
from twinax.inference.serving.app import Service, application
from twinax.inference.serving.directions import Directions
from twinax.inference.serving.engine import Engine
from twinax.inference.serving.requests import Limits
from twinax.inference.translator import Translator

_CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@contextmanager
def serving(
    translator: Translator,
    token: str | None = None,
    names: tuple[str | None, str | None] = ("de", "en"),
    silence: float = 0.5,
    **decoding: Any,
) -> Iterator[tuple[str, Service]]:
    """(address, service) of a server, which handles no signals. `silence`: seconds that a connection may be silent."""
    servers = []

    class OnThread(server._Server):
        def __init__(self, config: Any):
            super().__init__(config)
            servers.append(self)

        def capture_signals(self) -> Any:
            return nullcontext()

    settings = translator.decoding(**{"beam_size": 2, "max_length": 8, **decoding})
    engine = Engine(Directions(translator, *names), settings)
    service = Service.of("model", engine, Limits(1 << 20, 2000, settings.beam_size), token=token)
    with server.bound_socket("127.0.0.1", 0) as bound, pytest.MonkeyPatch.context() as context:
        context.setattr(server, "_Server", OnThread)
        context.setattr(server, "_SILENCE", silence)
        thread = threading.Thread(target=server.run, args=(application(service), bound))
        thread.start()
        try:
            while not servers or not servers[0].started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", service
        finally:
            servers[0].should_exit = True
            thread.join()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless Chromium: the system's, or what `playwright install chromium` brought."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*_CHROMIUM])
        yield browser
        browser.close()
