"""A span for each unary call of a gRPC server, within the one that the caller names in its
metadata."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from . import errors
from .rpc_handlers import handler_like
from .tracing import Tracing


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor of unary calls. Sessions, which carry many requests, are left alone: their
    streams have spans of their own."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(details)
        metadata = dict(details.invocation_metadata or ())
        if handler is None or handler.unary_unary is None or "traceparent" not in metadata:
            return handler
        behavior: Any = handler.unary_unary
        method = str(details.method).rpartition("/")[2]
        traceparent = str(metadata["traceparent"])
        tracestate = str(metadata.get("tracestate", ""))

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            span = self._tracing.begin(method, traceparent, tracestate)
            error = "cancelled"
            try:
                reply = await behavior(request, context)
                error = ""
            except errors.HeadwaterError as fault:
                error = fault.code
                raise
            finally:
                span.end(error)
            return reply

        return handler_like(handler, traced)
