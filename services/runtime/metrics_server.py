"""The HTTP server on which a stage answers Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import prometheus_client

from .advertise import joined, listened


@contextlib.contextmanager
def metrics_served(host: str, port: int) -> Iterator[dict[str, str]]:
    """Serves /metrics for the length of a scope; yields its address by name, nothing where port is -1."""
    if port < 0:
        yield {}
        return
    server, thread = prometheus_client.start_http_server(port, listened(host))
    try:
        yield {"metrics": joined(host, server.server_port)}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
