"""A receiver of OpenTelemetry's spans (OTLP over gRPC) that keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]  # it ships no types
    """Keeps every span, with the name of the process that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = [
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            ]
            self.spans += [
                (names[0], span) for scope in resource.scope_spans for span in scope.spans
            ]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def receiving() -> Iterator[tuple[Collector, str]]:
    """A collector on loopback, and its address as stages take it."""
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def attributes_of(span: Any) -> dict[str, Any]:
    return {each.key: plain(each.value) for each in span.attributes}


def plain(value: Any) -> Any:
    """A value of OTLP as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)
