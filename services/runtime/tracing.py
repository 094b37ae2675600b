"""Spans of one process, sent to an OpenTelemetry collector. Without tracing, nothing of
OpenTelemetry is imported or called.

Times are seconds of `time.perf_counter`, the clock that stages measure with.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from .pip_line import pip_line
from .settings import SettingError
from .trace_context import TraceContext
from .version import full_version

CALLS = frozenset({"prepare", "stream"})
"""Parts of a gateway's span during which another stage works for it."""
FLUSH_MILLISECONDS = 2000
"""Milliseconds that the last spans get to reach the collector when the process stops."""


class Span(Protocol):
    """A request's stay in one process."""

    is_collected: ClassVar[bool]
    """Whether parts are exported; False: callers need not make them."""

    @property
    def context(self) -> TraceContext:
        """Context for the next stage, whose spans become children of this one."""
        ...

    def part(
        self, name: str, began: float, ended: float, *, behind: object = None, **attributes: Any
    ) -> object:
        """Adds a finished part of the span, linked to `behind`, the part that it follows. Returns a
        reference for links of later parts."""
        ...

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Sets attributes, whose names may be those of OpenTelemetry's conventions."""
        ...

    def count(self, name: str, by: int) -> None:
        """Adds to an attribute that is a number."""
        ...

    def end(self, error: str = "", **attributes: Any) -> None: ...


class Tracing(Protocol):
    is_collected: ClassVar[bool]
    """Whether its spans go anywhere; False: their attributes need not be made."""

    def begin(self, name: str, traceparent: str, tracestate: str = "", **attributes: Any) -> Span:
        """Begins a span now, within the one that `traceparent` names, or as the root of a trace."""
        ...


@dataclass(frozen=True, slots=True)
class NoSpan:
    """Passes on the trace and collects nothing."""

    is_collected: ClassVar[bool] = False
    context: TraceContext = field(default_factory=TraceContext.fresh)

    def part(
        self, name: str, began: float, ended: float, *, behind: object = None, **attributes: Any
    ) -> object: ...
    def describe(self, attributes: Mapping[str, Any]) -> None: ...
    def count(self, name: str, by: int) -> None: ...
    def end(self, error: str = "", **attributes: Any) -> None: ...


class NoTracing:
    """Tracing that records nothing."""

    is_collected: ClassVar[bool] = False

    def begin(self, name: str, traceparent: str, tracestate: str = "", **attributes: Any) -> NoSpan:
        context = TraceContext.parse(traceparent, tracestate)
        return NoSpan(context) if context is not None else NoSpan()


NO_TRACING = NoTracing()


class CollectedSpan:
    is_collected: ClassVar[bool] = True

    def __init__(self, tracer: Any, name: str, parent: Any, attributes: dict[str, Any]) -> None:
        """A span of kind SERVER: each stage serves the one before it."""
        from opentelemetry import trace  # noqa: PLC0415 (an extra, wanted only where spans are)

        self._trace = trace
        self._tracer = tracer
        # The clocks drift apart over days: they are compared once a span.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._counts: dict[str, int] = {}
        self._span = tracer.start_span(
            name, context=parent, kind=trace.SpanKind.SERVER, attributes=attributes
        )

    @property
    def context(self) -> TraceContext:
        own = self._span.get_span_context()
        state = own.trace_state.to_header()
        return TraceContext(
            f"{own.trace_id:032x}", f"{own.span_id:016x}", own.trace_flags.sampled, state
        )

    def part(
        self, name: str, began: float, ended: float, *, behind: Any = None, **attributes: Any
    ) -> object:
        kinds = self._trace.SpanKind
        child = self._tracer.start_span(
            name,
            context=self._trace.set_span_in_context(self._span),
            kind=kinds.CLIENT if name in CALLS else kinds.INTERNAL,
            start_time=self._ns(began),
            links=[] if behind is None else [self._trace.Link(behind)],
            attributes=attributes,
        )
        child.end(self._ns(ended))
        return child.get_span_context()

    def describe(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def count(self, name: str, by: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + by
        self._span.set_attribute(name, self._counts[name])

    def end(self, error: str = "", **attributes: Any) -> None:
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(self._trace.StatusCode.ERROR, error)
        self._span.end()

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + int(seconds * 1e9)


class CollectedTracing:
    is_collected: ClassVar[bool] = True

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def begin(
        self, name: str, traceparent: str, tracestate: str = "", **attributes: Any
    ) -> CollectedSpan:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        headers = {"traceparent": traceparent, "tracestate": tracestate}
        parent = TraceContextTextMapPropagator().extract(headers) if traceparent else None
        return CollectedSpan(self._tracer, name, parent, attributes)


@contextlib.contextmanager
def tracing_to(endpoint: str, stage: str, replica_id: str) -> Iterator[Tracing]:
    """Sends spans to the OTLP collector at `endpoint` (http://host:port, gRPC) for the length of a
    scope; empty: none.

    The share of sampled traces is OpenTelemetry's own setting (OTEL_TRACES_SAMPLER). Raises
    `SettingError` where the extra `tracing` is not installed.
    """
    if not endpoint:
        yield NO_TRACING
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (as above)
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        raise SettingError(
            "otlp_endpoint", endpoint, f"none, or first: {pip_line('tracing')}"
        ) from None
    resource = Resource.create(
        {
            "service.name": f"headwater-{stage}",
            "service.instance.id": replica_id,
            "service.version": full_version(),
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=FLUSH_MILLISECONDS / 1000))
    )
    try:
        yield CollectedTracing(provider.get_tracer("headwater"))
    finally:
        provider.force_flush(FLUSH_MILLISECONDS)
        provider.shutdown()
