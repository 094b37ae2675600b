"""Calls about adapters to engines, over channels of their own: they are seldom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from headwater.proto import engine_pb2 as pb
from headwater.services.runtime import errors
from headwater.services.runtime.member import Member

from ..stages.engine_call import ask_engine

CHECK_SECONDS = 120.0
DROP_SECONDS = 10.0
INFO_SECONDS = 5.0
ReplyT = TypeVar("ReplyT")


async def check_folder(
    engine: Member, folder: str, *, within: str = "", digest: bytes = b""
) -> pb.CheckAdapterReply:
    """Has an engine read an adapter from a folder on its host. Raises what it is refused with."""
    request = pb.CheckAdapterRequest(folder=folder, within=within, digest=digest)
    return await ask_engine(engine, lambda stub: stub.CheckAdapter(request, timeout=CHECK_SECONDS))


async def send_content(
    engine: Member, parts: AsyncIterator[pb.AdapterPart]
) -> pb.CheckAdapterReply:
    """Sends an adapter to an engine, which reads it. Raises the engine's error."""
    return await ask_engine(engine, lambda stub: stub.SendAdapter(parts, timeout=CHECK_SECONDS))


async def forget(engine: Member, digest: bytes) -> None:
    """Has an engine drop an adapter when its requests have ended. Raises `HeadwaterError`."""
    request = pb.UnloadAdapterRequest(digest=digest)
    await ask_engine(engine, lambda stub: stub.UnloadAdapter(request, timeout=DROP_SECONDS))


async def unload(engine: Member, name: str) -> None:
    """Takes a name from an adapter that an engine was started with. Raises `HeadwaterError`."""
    request = pb.UnloadAdapterRequest(name=name)
    await ask_engine(engine, lambda stub: stub.UnloadAdapter(request, timeout=DROP_SECONDS))


async def described(engine: Member) -> Member:
    """An engine as it describes itself now. Raises `HeadwaterError`, `ValueError`."""
    reply = await ask_engine(engine, lambda stub: stub.Info(pb.InfoRequest(), timeout=INFO_SECONDS))
    return Member.from_pb(reply)


async def of_each(
    engines: Sequence[Member], ask: Callable[[Member], Awaitable[ReplyT]]
) -> list[ReplyT | errors.HeadwaterError]:
    """Calls all engines at once; returns the reply or the error of each."""

    async def reply_of(engine: Member) -> ReplyT | errors.HeadwaterError:
        try:
            return await ask(engine)
        except errors.HeadwaterError as error:
            return error

    return list(await asyncio.gather(*map(reply_of, engines)))
