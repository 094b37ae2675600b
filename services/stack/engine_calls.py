"""Calls of the supervisor to engines of its machine: to sleep, to wake, and who they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc

from headwater.proto import engine_pb2 as pb
from headwater.proto import engine_pb2_grpc

from ..runtime.channel import open_channel
from ..runtime.member import Member

CALL_SECONDS = 600.0
"""Longest time that an engine takes to fall asleep or to wake: `MOVING_SECONDS` of its core's
watch."""
DESCRIBED_SECONDS = 10.0
"""Longest time that an engine takes to describe itself."""


class EngineCallFailed(Exception):
    """An engine did not do what it was called for. The message is a sentence."""


async def sleep(address: str) -> int:
    """Has an engine give its device's memory back; how many bytes. Raises `EngineCallFailed`."""
    async with _stub(address) as stub:
        reply = await stub.Sleep(pb.SleepRequest(), timeout=CALL_SECONDS)
    return int(reply.num_bytes)


async def wake(address: str) -> None:
    """Has an engine bring its memory back. Raises `EngineCallFailed`."""
    async with _stub(address) as stub:
        await stub.Wake(pb.WakeRequest(), timeout=CALL_SECONDS)


class LoadedWeights(NamedTuple):
    """Weights that an engine has loaded in addition to those in use."""

    number: int
    """Name of these weights in calls of the engine."""
    numerics_id: str
    """Id of what the engine would compute with them."""


async def load_weights(address: str, folder: Path) -> LoadedWeights:
    """Has an engine load a folder's weights beside its own. Raises `EngineCallFailed`."""
    async with _stub(address) as stub:
        request = pb.LoadWeightsRequest(folder=str(folder))
        reply = await stub.LoadWeights(request, timeout=CALL_SECONDS)
    return LoadedWeights(reply.number, reply.numerics_id)


async def replace_weights(address: str, number: int, *, ends_requests: bool) -> float:
    """Has an engine compute with loaded weights. Returns the seconds in which it computed nothing.
    Raises `EngineCallFailed`."""
    request = pb.ReplaceWeightsRequest(number=number, ends_requests=ends_requests)
    async with _stub(address) as stub:
        return float((await stub.ReplaceWeights(request, timeout=CALL_SECONDS)).seconds)


async def drop_weights(address: str, number: int) -> None:
    """Has an engine forget loaded weights. Raises `EngineCallFailed`."""
    async with _stub(address) as stub:
        await stub.DropWeights(pb.DropWeightsRequest(number=number), timeout=DESCRIBED_SECONDS)


async def described(address: str) -> Member:
    """An engine as it describes itself now. Raises `EngineCallFailed`."""
    async with _stub(address) as stub:
        return Member.from_pb(await stub.Info(pb.InfoRequest(), timeout=DESCRIBED_SECONDS))


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[engine_pb2_grpc.EngineAsyncStub]:
    async with open_channel(address) as channel:
        try:
            yield engine_pb2_grpc.EngineStub(channel)
        except grpc.aio.AioRpcError as failed:
            raise EngineCallFailed(failed.details() or str(failed.code())) from None
