"""The HTTP server on which a stage answers Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from .advertise import joined, listened

COLLECT_SECONDS = 10.0
"""Seconds for which a scrape waits for the event loop; Prometheus waits no longer by default."""


@contextlib.contextmanager
def metrics_served(
    host: str, port: int, facts: Collector | None = None
) -> Iterator[dict[str, str]]:
    """Serves /metrics inside the `with` block, and `facts` with them; yields its address by name,
    nothing where port is -1. To be entered on the event loop, which collects."""
    if port < 0:
        yield {}
        return
    if facts is not None:
        prometheus_client.REGISTRY.register(facts)
    registry = _OnLoop(prometheus_client.REGISTRY, asyncio.get_running_loop())
    server, thread = prometheus_client.start_http_server(port, listened(host), registry)
    try:
        yield {"metrics": joined(host, server.server_port)}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        if facts is not None:
            prometheus_client.REGISTRY.unregister(facts)


class _OnLoop(Collector):
    """A registry whose collectors run on the event loop. A scrape runs in its own thread, where
    collectors would read state while the loop changes it."""

    def __init__(self, registry: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        collected: Future[list[Metric]] = Future()
        self._loop.call_soon_threadsafe(_collect, self._registry, collected)
        return collected.result(COLLECT_SECONDS)

    def restricted_registry(self, names: Iterable[str]) -> Collector:
        """Like `CollectorRegistry.restricted_registry`, for a scrape that asks for some names
        only."""
        assert isinstance(self._registry, CollectorRegistry)
        return _OnLoop(self._registry.restricted_registry(names), self._loop)


def _collect(registry: Collector, collected: Future[list[Metric]]) -> None:
    try:
        collected.set_result([*registry.collect()])
    except Exception as fault:
        # The scrape answers with it.
        collected.set_exception(fault)
