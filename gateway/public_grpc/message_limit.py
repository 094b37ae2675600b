"""Bounds the time in which the message of a call over gRPC has to come."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headwater.services.runtime import errors
from headwater.services.runtime.rpc_handlers import Handler, behavior_of

Context = grpc.aio.ServicerContext[Any, Any]


class MessageLimit(grpc.aio.ServerInterceptor):
    """Ends calls whose one message does not come in time. NOTE: grpcio (1.85) reads it before it
    calls a handler, and waits for it for ever. A handler of a stream of messages is called at once,
    and reads the first one itself."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        behavior = behavior_of(handler)
        make = grpc.stream_stream_rpc_method_handler
        if not handler.response_streaming:
            behavior = self._reading(behavior)
            make = grpc.stream_unary_rpc_method_handler
        elif inspect.isasyncgenfunction(behavior):
            behavior = self._reading_generator(behavior)
        else:
            behavior = self._reading(behavior)
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _reading(self, behavior: Any) -> Any:
        async def read_and_answer(_messages: Any, context: Context) -> Any:
            return await behavior(await self._message(context), context)

        return read_and_answer

    def _reading_generator(self, behavior: Any) -> Any:
        async def read_and_answer(_messages: Any, context: Context) -> AsyncIterator[Any]:
            async with contextlib.aclosing(
                behavior(await self._message(context), context)
            ) as replies:
                async for reply in replies:
                    yield reply

        return read_and_answer

    async def _message(self, context: Context) -> Any:
        """Raises `SlowMessage`, `BadRequest`."""
        try:
            async with asyncio.timeout(self._seconds):
                message = await context.read()
        except TimeoutError:
            raise errors.SlowMessage(self._seconds) from None
        except DecodeError as fault:
            raise errors.BadRequest(None, f"the call's message cannot be read: {fault}") from None
        if message is grpc.aio.EOF:
            raise errors.BadRequest(None, "the call has no message; allowed: one")
        return message
