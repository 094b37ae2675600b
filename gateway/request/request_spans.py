"""The spans of requests as they come."""

from __future__ import annotations

import structlog

from headwater.services.runtime.tracing import Tracing

from ..tenancy.caller import Caller
from .span_attributes import request_attributes


class RequestSpans:
    """`key`: the cluster's master key, by which names of tenants are hashed."""

    def __init__(self, tracing: Tracing, key: bytes | None) -> None:
        self._tracing = tracing
        self._key = key

    def begun(self, caller: Caller, name: str) -> Caller:
        """The caller with a span that the request's other spans are part of. Binds its ids to the
        log."""
        tenant = caller.tenant.id
        request_id = caller.request_id
        is_collected = self._tracing.is_collected
        fields = request_attributes(request_id, tenant, self._key) if is_collected else {}
        span = self._tracing.begin(name, caller.traceparent, caller.tracestate, **fields)
        structlog.contextvars.bind_contextvars(
            request_id=request_id, tenant=tenant, trace_id=span.context.trace_id
        )
        return caller.within(span)
