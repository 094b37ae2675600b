"""Asks a process at an address over gRPC for its identity and health; for seeds, and while the bus
is away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headwater.proto import engine_pb2, engine_pb2_grpc

from .call_proof import Impostor, StageChannel
from .channel import open_channel
from .fault_log import FaultLog
from .member import Kind, Member

PROBE_SECONDS = 1.0
SERVICES = {
    Kind.PROCESSOR: "headwater.v1.Processor",
    Kind.OUTPUT_PROCESSOR: "headwater.v1.OutputProcessor",
}
"""Health services by kind of stage: an address may have become that of another stage."""


class Prober:
    """Prober with one channel per address, kept while its owner is."""

    def __init__(self) -> None:
        self._channels: dict[str, StageChannel] = {}
        self._faults = FaultLog("introduction not understood", (ValueError,))

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Prober]:
        prober = cls()
        try:
            yield prober
        finally:
            for channel in prober._channels.values():
                await channel.close(None)

    async def forget(self, address: str) -> None:
        """Closes the channel to an address that is no longer asked."""
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close(None)

    async def probe(self, kind: Kind, address: str) -> Member | None:
        """Member at an address; None when no process answers, or not as a healthy `kind`.

        An engine introduces itself. Any other stage is named by its address, with epoch 0.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        try:
            if kind is Kind.ENGINE:
                return await self._introduction(channel, address)
            return await self._healthy(channel, kind, address)
        except (grpc.aio.AioRpcError, Impostor):
            return None
        except ValueError as fault:
            self._faults.add(fault, address=address)
            return None

    async def _introduction(self, channel: StageChannel, address: str) -> Member | None:
        engine: Any = engine_pb2_grpc.EngineStub(channel)
        call = engine.Info(engine_pb2.InfoRequest(), timeout=PROBE_SECONDS)
        await channel.proven(call)
        reply = await call
        # From now on the address that worked is used.
        reply.address = address
        member = Member.from_pb(reply)
        return member if member.kind is Kind.ENGINE and not member.leaving else None

    async def _healthy(self, channel: StageChannel, kind: Kind, address: str) -> Member | None:
        request = health_pb2.HealthCheckRequest(service=SERVICES.get(kind, ""))
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_SECONDS)
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            return None
        return Member(kind=kind, replica_id=address, epoch=0, address=address)
