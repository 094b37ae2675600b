"""Suspects of an engine's death at several gateways: tried one at a time, and none blamed for what
another may have done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.gateway.request.doubts import (
    DEAD_SECONDS,
    EXPIRY_SECONDS,
    LOOK_SECONDS,
    PATIENCE_SECONDS,
    STAGGER_SECONDS,
    Doubts,
)
from headwater.gateway.request.fault_history import FaultHistory
from headwater.gateway.request.migrations import Migrations
from headwater.gateway.request.stream_failure import Cause, PoisonRequest, StreamLost
from headwater.services.runtime.bus import Bus
from tests.simulation.bus_twin import Air, BusTwin
from tests.simulation.virtual_loop import run_virtually

FIRST = ("e1", 1)
SECOND = ("e2", 1)
THIRD = ("e3", 1)
HEARD = 0.01
"""Seconds until the others have heard."""


@contextlib.asynccontextmanager
async def gateway(bus: Bus, epoch: int) -> AsyncIterator[Doubts]:
    async with Doubts(
        bus, epoch, lambda: True, asyncio.get_running_loop().time
    ).running() as doubts:
        yield doubts


def with_two(work: Callable[[Doubts, Doubts, BusTwin], Awaitable[None]]) -> None:
    """Runs `work` with two gateways, and the first one's bus."""

    async def main() -> None:
        air = Air()
        async with (
            BusTwin.on(air) as here,
            BusTwin.on(air) as there,
            gateway(here, 5) as one,
            gateway(there, 700) as two,
        ):
            await work(one, two, here)

    run_virtually(main(), 0)


def test_a_doubted_request_is_known_elsewhere_until_it_is_trusted() -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        one.begin("m", FIRST)
        one.begin("m", FIRST)
        await asyncio.sleep(HEARD)
        assert two.are_elsewhere(FIRST)
        assert not two.are_elsewhere(SECOND)
        assert not one.are_elsewhere(FIRST)
        one.end("m", FIRST, has_died=False)
        await asyncio.sleep(HEARD)
        assert two.are_elsewhere(FIRST)
        one.end("m", FIRST, has_died=False)
        await asyncio.sleep(HEARD)
        assert not two.are_elsewhere(FIRST)

    with_two(work)


def test_an_engine_that_died_with_one_is_known_for_a_while() -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        one.begin("m", FIRST)
        one.end("m", FIRST, has_died=True)
        await asyncio.sleep(DEAD_SECONDS - 1)
        assert two.are_elsewhere(FIRST)
        await asyncio.sleep(3)
        assert not two.are_elsewhere(FIRST)

    with_two(work)


def test_a_gateway_that_fell_silent_is_forgotten() -> None:
    async def work(one: Doubts, two: Doubts, bus: BusTwin) -> None:
        one.begin("m", FIRST)
        await asyncio.sleep(EXPIRY_SECONDS + 1)
        assert two.are_elsewhere(FIRST)
        bus.lose()
        await asyncio.sleep(EXPIRY_SECONDS + 1)
        assert not two.are_elsewhere(FIRST)

    with_two(work)


@pytest.mark.parametrize("has_died", [False, True])
def test_a_suspect_waits_for_that_of_another_gateway(has_died: bool) -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        one.begin("m", FIRST)
        await asyncio.sleep(HEARD)
        waiting = asyncio.create_task(two.until_alone("m"))
        await two.until_alone("another model")
        await asyncio.sleep(1)
        assert not waiting.done()
        one.end("m", FIRST, has_died=has_died)
        await asyncio.sleep(0.1)
        assert waiting.done()

    with_two(work)


def test_no_suspect_waits_for_ever() -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        one.begin("m", FIRST)
        await asyncio.sleep(HEARD)
        began = asyncio.get_running_loop().time()
        await two.until_alone("m")
        assert (
            0
            < asyncio.get_running_loop().time() - began - PATIENCE_SECONDS
            < STAGGER_SECONDS + LOOK_SECONDS
        )

    with_two(work)


class Suspect:
    """One generation of a gateway."""

    def __init__(self, doubts: Doubts, name: str) -> None:
        count = SimpleNamespace(add=lambda *given: None)
        self.migrations = Migrations(doubts)
        cluster: Any = SimpleNamespace(
            migrations=self.migrations,
            metrics=SimpleNamespace(retries=count, migrations=count, hand_overs=count),
        )
        self._generation: Any = SimpleNamespace(
            request=SimpleNamespace(caller=SimpleNamespace(request_id=name)),
            timeline=SimpleNamespace(attempts=()),
            attempt=0,
            has_begun=False,
            unfinished=[SimpleNamespace(doubt=lambda: None, is_past_doubt=True)],
            model=SimpleNamespace(key="m"),
            num_output_tokens=0,
        )
        self.faults = FaultHistory(cluster, self._generation)

    async def begin(self, engine: tuple[str, int]) -> None:
        await self.faults.begin_trial()
        decision = SimpleNamespace(replica_id=engine[0], incarnation=engine, hands_over=False)
        attempt = SimpleNamespace(decision=decision, start=None, was_alone=self.faults.is_on_trial)
        self._generation.timeline.attempts += (attempt,)
        self.faults.dispatched(engine)

    def lose(self) -> None:
        self.faults.pass_trial()
        self.faults.consider(StreamLost("gone", Cause.ENGINE_GONE))


def test_the_innocent_one_of_two_suspects_is_never_blamed() -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        poison = Suspect(one, "poison")
        innocent = Suspect(two, "innocent")
        for suspect in (poison, innocent):
            await suspect.begin(FIRST)
        for suspect in (poison, innocent):
            suspect.lose()
        # The first gateway begins first; the other sees that and waits.
        trial = asyncio.create_task(innocent.begin(SECOND))
        await poison.begin(SECOND)
        await asyncio.sleep(1)
        assert not trial.done()
        with pytest.raises(PoisonRequest):
            poison.lose()
        await asyncio.sleep(0.1)
        assert trial.done()
        innocent.faults.got_further()
        assert not innocent.faults.is_doubted

    with_two(work)


def test_suspects_that_ran_beside_one_another_are_tried_again() -> None:
    async def work(one: Doubts, two: Doubts, _: BusTwin) -> None:
        poison = Suspect(one, "poison")
        innocent = Suspect(two, "innocent")
        for suspect in (poison, innocent):
            await suspect.begin(FIRST)
            suspect.lose()
        # As where the bus lost a message: both run.
        await poison.begin(SECOND)
        cast("Any", innocent.migrations).alone = Migrations().alone
        await innocent.begin(SECOND)
        await asyncio.sleep(HEARD)
        for suspect in (poison, innocent):
            suspect.lose()
        await asyncio.sleep(HEARD)
        await poison.begin(THIRD)
        with pytest.raises(PoisonRequest):
            poison.lose()

    with_two(work)
