"""The server's metrics, in Prometheus's format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)
_LOADED = "/jax/core/compile/backend_compile_duration"  # JAX's event, also for programs from the compilation cache


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, waiting: Callable[[], int]):
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "twinax_requests", "Requests by path and status", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "twinax_request_seconds", "Seconds until the last byte", ["path"], buckets=_SECONDS, registry=registry
        )
        self.sentences = Counter("twinax_sentences", "Translated sentences", registry=registry)
        self.left = Counter("twinax_clients_left", "Requests whose client left before the answer", registry=registry)
        self._rounds = Histogram("twinax_round_items", "Items per round", buckets=_ITEMS, registry=registry)
        self._busy = Counter("twinax_busy_seconds", "Seconds in which the model computed", registry=registry)
        self._programs = Counter(
            "twinax_programs", "Programs that were compiled or read from the compilation cache", registry=registry
        )
        Gauge("twinax_waiting", "Sentences that wait", registry=registry).set_function(waiting)

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def observe_round(self, size: int, seconds: float) -> None:
        """Count a round of the batcher."""
        self._rounds.observe(size)
        self._busy.inc(seconds)

    def observe_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        """Count a compiled program, as a listener of `jax.monitoring`."""
        if event == _LOADED:
            self._programs.inc()

    def text(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
