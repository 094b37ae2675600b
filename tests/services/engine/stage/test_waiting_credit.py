from __future__ import annotations

import asyncio

from headwater.proto.events_pb2 import Backlog, Load
from headwater.services.engine.stage.waiting_credit import (
    EXPIRY_SECONDS,
    MIN_TOKENS,
    WaitingCredits,
)
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import ReplicaLoad


def test_room_for_waiting_prompts_follows_what_waits_and_no_gateway_is_left_without() -> None:
    now = 0.0
    credits = WaitingCredits(lambda: now)
    assert credits.shares(20_000.0) == {}
    credits.on_backlog(1, 0)
    assert credits.shares(0.0) == {}
    assert credits.shares(100.0) == {1: MIN_TOKENS}
    credits.on_backlog(2, 0)
    assert credits.shares(20_000.0) == {1: 5000, 2: 5000}
    credits.on_backlog(1, 9000)
    credits.on_backlog(2, 1000)
    assert credits.shares(20_000.0) == {1: 7000, 2: 3000}
    now = EXPIRY_SECONDS - 0.1
    credits.on_backlog(2, 0)
    now = EXPIRY_SECONDS
    assert credits.shares(20_000.0) == {2: 10_000}


def test_credits_travel_with_a_load() -> None:
    load = ReplicaLoad(num_running=3, waiting_credits={2**64 - 1: 512})
    assert ReplicaLoad.from_pb(Load.FromString(load.to_pb("a", 1).SerializeToString())) == load


async def test_backlogs_of_the_model_alone_are_received_over_the_bus(nats_url: str) -> None:
    async with (
        Bus.open(nats_url) as bus,
        WaitingCredits(asyncio.get_running_loop().time).running(bus, "m") as credits,
    ):
        for model_key, epoch in (("other", 7), ("m", 8)):
            backlog = Backlog(epoch=epoch, tokens=10)
            await bus.publish(subjects.backlog(model_key, epoch), backlog.SerializeToString())
        async with asyncio.timeout(60):
            while not credits.shares(1.0):  # noqa: ASYNC110 (what is heard has no event)
                await asyncio.sleep(0.005)
        assert credits.shares(1.0).keys() == {8}
