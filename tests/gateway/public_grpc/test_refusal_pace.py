"""Refusals of a caller that calls again and again."""

from __future__ import annotations

import asyncio

import pytest

from headwater.gateway.public_grpc import refusal_pace
from headwater.gateway.public_grpc.refusal_pace import (
    AT_ONCE,
    EACH_SECONDS,
    MAX_WAIT_SECONDS,
    RefusalPace,
)


async def waited(pace: RefusalPace, caller: str) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await pace.wait(caller)
    return loop.time() - began


async def test_the_first_refusals_come_at_once_and_later_ones_in_turn() -> None:
    pace = RefusalPace()
    waits = await asyncio.gather(*(waited(pace, "a") for _ in range(2 * AT_ONCE)))
    # A timer never ends early, but may end late: there is no upper bound.
    assert sum(wait >= EACH_SECONDS / 2 for wait in waits) >= AT_ONCE - 2
    assert waits[-1] >= (AT_ONCE - 2) * EACH_SECONDS


async def test_a_caller_does_not_wait_for_another_one() -> None:
    pace = RefusalPace()
    flood = [asyncio.create_task(pace.wait("a")) for _ in range(200)]
    await asyncio.sleep(0)
    other = asyncio.create_task(pace.wait("b"))
    await asyncio.sleep(0)
    assert other.done()
    assert not all(each.done() for each in flood)
    for each in flood:
        each.cancel()


async def test_no_refusal_waits_for_longer_than_a_second_and_few_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusal_pace, "MAX_HELD", 5)
    pace = RefusalPace()
    flood = [asyncio.create_task(pace.wait("a")) for _ in range(1000)]
    await asyncio.sleep(0)
    assert sum(not each.done() for each in flood) == 5
    await asyncio.gather(*flood)
    now = asyncio.get_running_loop().time()
    assert pace._next["a"] <= now + MAX_WAIT_SECONDS + EACH_SECONDS
