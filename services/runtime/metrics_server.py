"""The HTTP server on which a stage answers Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
from prometheus_client.exposition import ThreadingWSGIServer
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
    nothing where port is -1. To be entered on the event loop, which accepts connections and
    collects."""
    if port < 0:
        yield {}
        return
    loop = asyncio.get_running_loop()
    registry = _OnLoop(prometheus_client.REGISTRY, loop)
    with contextlib.ExitStack() as stack:
        if facts is not None:
            prometheus_client.REGISTRY.register(facts)
            stack.callback(prometheus_client.REGISTRY.unregister, facts)
        server = stack.enter_context(_Server(listened(host), port, registry))
        # NOTE: a server's own thread looks only twice a second whether it is to end.
        loop.add_reader(server.fileno(), server.handle_request)
        stack.callback(loop.remove_reader, server.fileno())
        yield {"metrics": joined(host, server.server_port)}


class _Server(ThreadingWSGIServer):
    """Answers each scrape in a thread of its own. `handle_request` never waits."""

    def __init__(self, host: str, port: int, registry: Collector) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, (address, *_) = found[0]
        super().__init__((str(address), port), _Handler)
        self.set_app(prometheus_client.make_wsgi_app(registry))
        self.socket.setblocking(False)


class _Handler(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


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
        # The scrape's reply carries the error.
        collected.set_exception(fault)
