"""Prefetches at an engine that a test plays: how long their calls last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.gateway.stages.prefetches import Prefetches
from headwater.proto import engine_pb2 as pb
from headwater.proto import engine_pb2_grpc
from headwater.services.runtime.listener import Listener

REQUEST = pb.PrefetchRequest(epoch=3, tenant="t")


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Notes what it is asked, and when a call ends; serves no call any longer than that."""

    def __init__(self, *, ends_at_once: bool = False) -> None:
        self.asked: asyncio.Queue[pb.PrefetchRequest] = asyncio.Queue()
        self.ended = asyncio.Event()
        self._ends_at_once = ends_at_once

    async def Prefetch(
        self, requests: AsyncIterator[pb.PrefetchRequest], context: Any
    ) -> pb.PrefetchReply:
        try:
            async for request in requests:
                self.asked.put_nowait(request)
                if self._ends_at_once:
                    break
        finally:
            self.ended.set()
        return pb.PrefetchReply()


async def serve(engine: ScriptedEngine) -> Listener:
    listener = Listener("127.0.0.1", 0)
    engine_pb2_grpc.add_EngineServicer_to_server(engine, listener.server)
    await listener.start()
    return listener


@pytest.mark.parametrize("way", ["scope", "leave", "close"])
async def test_a_call_lasts_as_long_as_its_scope_its_engine_and_the_gateway(way: str) -> None:
    engine = ScriptedEngine()
    listener = await serve(engine)
    prefetches = Prefetches()
    async with asyncio.timeout(60):
        with prefetches.running(listener.address, REQUEST):
            assert await engine.asked.get() == REQUEST
            assert not engine.ended.is_set()
            if way == "leave":
                prefetches.leave(listener.address)
                await engine.ended.wait()
            elif way == "close":
                await prefetches.close()
                await engine.ended.wait()
        await engine.ended.wait()
    await prefetches.close()
    await listener.server.stop(0)


async def test_an_engine_that_is_away_or_ends_the_call_changes_nothing() -> None:
    engine = ScriptedEngine(ends_at_once=True)
    listener = await serve(engine)
    prefetches = Prefetches()
    async with asyncio.timeout(60):
        with prefetches.running("127.0.0.1:9", REQUEST):
            with prefetches.running(listener.address, REQUEST):
                await engine.ended.wait()
            await asyncio.sleep(0.2)
    await prefetches.close()
    await listener.server.stop(0)


async def test_an_engine_without_prefetches_changes_nothing() -> None:
    listener = await serve(engine_pb2_grpc.EngineServicer())  # type: ignore[arg-type]
    prefetches = Prefetches()
    with prefetches.running(listener.address, REQUEST):
        await asyncio.sleep(0.3)
    await prefetches.close()
    await listener.server.stop(0)
