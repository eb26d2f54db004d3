"""Runs the application on a socket until a signal, and then finishes what is running."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import LOOPBACK

_SILENCE = 10  # seconds that a connection may be silent before, within and between the headers of requests
_ENDING = 120  # seconds for running requests after a signal


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach an address."""
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet; port 0 selects a free one. Raises: OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def run(app: ASGIApp, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        timeout_keep_alive=_SILENCE,
        timeout_graceful_shutdown=_ENDING,
        server_header=False,
    )
    asyncio.run(_Server(config).serve([bound]))


class _Server(uvicorn.Server):
    """A server that a signal ends with the exit status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


class _Protocol(H11Protocol):
    """uvicorn closes connections that are silent after a response; this closes those without a complete request too."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._close_if_silent()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._close_if_silent()

    def _close_if_silent(self) -> None:
        if self.timeout_keep_alive_task is None:
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)
