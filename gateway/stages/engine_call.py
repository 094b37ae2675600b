"""One call to an engine, over a channel of its own: for calls that are too rare to keep one
open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from headwater.proto import engine_pb2_grpc
from headwater.services.runtime import grpc_errors
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.member import Member

ReplyT = TypeVar("ReplyT")


async def ask_engine(
    engine: Member, ask: Callable[[engine_pb2_grpc.EngineAsyncStub], Awaitable[ReplyT]]
) -> ReplyT:
    """Returns the engine's reply. Raises the engine's error, and `Unavailable` when the engine is
    out of reach."""
    async with open_channel(engine.address) as channel:
        try:
            return await ask(engine_pb2_grpc.EngineStub(channel))
        except grpc.aio.AioRpcError as failure:
            raise grpc_errors.from_rpc_error(failure) from None
