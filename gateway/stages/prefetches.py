"""Prefetches at engines: a call each, which lasts until its request goes on elsewhere or ends.

Advice throughout: an engine that is away, leaves or knows no prefetches changes nothing for the
request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc
import structlog

from headwater.proto import engine_pb2_grpc
from headwater.proto.engine_pb2 import PrefetchRequest
from headwater.services.runtime.call_proof import Impostor, StageChannel
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.tasks import end, start_in


class Prefetches:
    """Channels to engines that were asked to prefetch, each until its engine leaves."""

    def __init__(self) -> None:
        self._channels: dict[str, StageChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def running(self, address: str, request: PrefetchRequest) -> Iterator[None]:
        """A prefetch inside the `with` block."""
        task = start_in(self._tasks, self._call(address, request))
        try:
            yield
        finally:
            task.cancel()

    def leave(self, address: str) -> None:
        """Closes the channel to an engine that is no longer a member; its prefetches end."""
        if (channel := self._channels.pop(address, None)) is not None:
            start_in(self._tasks, channel.close())

    async def close(self) -> None:
        for address in list(self._channels):
            self.leave(address)
        await end(*self._tasks)

    async def _call(self, address: str, request: PrefetchRequest) -> None:
        if (channel := self._channels.get(address)) is None:
            channel = self._channels[address] = open_channel(address)
        stub: engine_pb2_grpc.EngineAsyncStub = engine_pb2_grpc.EngineStub(channel)
        call = stub.Prefetch()
        try:
            await channel.proven(call)
            await call.write(request)
            await call
        except (grpc.aio.AioRpcError, Impostor) as failure:
            structlog.get_logger().debug(
                "prefetch ended early", engine=address, problem=str(failure)
            )
        finally:
            call.cancel()
