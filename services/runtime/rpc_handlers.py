"""The handlers of a gRPC server's calls, as interceptors replace them."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def behavior_of(handler: Handler) -> Any:
    """The function that answers the calls."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


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
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(behavior, handler.request_deserializer, handler.response_serializer)
