"""The handlers of a gRPC server's calls, as interceptors replace them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behavior_of(handler: Handler) -> Any:
    """The function that answers the calls."""
    return (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )


def handler_like(handler: Handler, behavior: Any) -> Handler:
    """A handler of calls of the same kind and messages that another function answers."""
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def refusing(refuse: Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]) -> Handler:
    """A handler of calls of any kind, which `refuse` aborts. It receives no message: that of a
    refused caller costs neither memory nor the time to parse it."""

    async def behavior(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(context)

    return grpc.stream_stream_rpc_method_handler(behavior)
