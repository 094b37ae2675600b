"""Bounds the time in which the message of a call over gRPC has to come."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headwater.proto import inference_pb2
from headwater.services.runtime import errors
from headwater.services.runtime.json_limits import MAX_FIELD_VALUES, check_json
from headwater.services.runtime.rpc_handlers import Handler, behavior_of, handler_like

from ..long_work import LONG_BODY_BYTES, LongWork
from .wire_records import check_fields

Context = grpc.aio.ServicerContext[Any, Any]


class MessageLimit(grpc.aio.ServerInterceptor):
    """Ends calls whose one message does not come in time. NOTE: grpcio (1.85) reads it before it
    calls a handler, and waits for it for ever. A handler of a stream of messages, that of
    reflection, is called at once and reads them itself, a generator."""

    def __init__(
        self, seconds: float, long_work: LongWork, tenant_of: Callable[[Context], str]
    ) -> None:
        """`tenant_of` returns the key in whose turn a long message is read."""
        self._seconds = seconds
        self._long_work = long_work
        self._tenant_of = tenant_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None:
            return handler
        behavior = behavior_of(handler)
        if handler.request_streaming:
            return handler_like(handler, _reading_all(behavior))
        parse = handler.request_deserializer
        make = grpc.stream_stream_rpc_method_handler
        if not handler.response_streaming:
            behavior = self._reading(behavior, parse)
            make = grpc.stream_unary_rpc_method_handler
        elif inspect.isasyncgenfunction(behavior):
            behavior = self._reading_generator(behavior, parse)
        else:
            behavior = self._reading(behavior, parse)
        # Without a parser of its own, the call gets the message's bytes.
        return make(behavior, None, handler.response_serializer)

    def _reading(self, behavior: Any, parse: Any) -> Any:
        async def read_and_answer(_messages: Any, context: Context) -> Any:
            return await behavior(await self._message(context, parse), context)

        return read_and_answer

    def _reading_generator(self, behavior: Any, parse: Any) -> Any:
        async def read_and_answer(_messages: Any, context: Context) -> AsyncIterator[Any]:
            async with contextlib.aclosing(
                behavior(await self._message(context, parse), context)
            ) as replies:
                async for reply in replies:
                    yield reply

        return read_and_answer

    async def _message(self, context: Context, parse: Any) -> Any:
        """Raises `SlowMessage`, `BadRequest`."""
        try:
            async with asyncio.timeout(self._seconds):
                data = await context.read()
        except TimeoutError:
            raise errors.SlowMessage(self._seconds) from None
        if data is grpc.aio.EOF:
            raise errors.BadRequest(None, "the call has no message; allowed: one")
        tenant = self._tenant_of(context)
        return await self._long_work.by_size(tenant, len(data), _parsed, data, parse)


def _parsed(data: bytes, parse: Any) -> Any:
    """The message. Raises `BadRequest`."""
    if len(data) >= LONG_BODY_BYTES:
        check_fields(data, parse.__self__.DESCRIPTOR)
    try:
        message = parse(data)
    except DecodeError as fault:
        raise _unreadable(fault) from None
    if len(data) >= LONG_BODY_BYTES and isinstance(message, inference_pb2.ChatRequest):
        # A processor would refuse it, too, behind others' requests.
        variables = message.conversation.chat_template_kwargs_json
        check_json(variables.encode(), "chat_template_kwargs", max_values=MAX_FIELD_VALUES)
    return message


def _reading_all(behavior: Any) -> Any:
    """The behavior of calls with several messages. Raises `BadRequest` for one that cannot be
    read."""

    async def read_and_answer(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(behavior(messages, context)) as replies:
                async for reply in replies:
                    yield reply
        except DecodeError as fault:
            raise _unreadable(fault) from None

    return read_and_answer


def _unreadable(fault: DecodeError) -> errors.BadRequest:
    return errors.BadRequest(None, f"the call's message cannot be read: {fault}")
