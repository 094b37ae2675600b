from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headwater.services.runtime import tasks
from headwater.services.runtime.tasks import ENDED_AT_ONCE, end, in_succession, owned_task


async def deaf(num_lost: int, out: list[str]) -> None:
    """Loses so many cancellations, as `asyncio.wait_for` does now and then, and then takes its time
    to leave."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not num_lost:
                await asyncio.sleep(0)
                out.append("out")
                raise
            num_lost -= 1


@pytest.mark.parametrize("num_lost", [0, 1, 3])
async def test_a_scope_ends_though_its_task_loses_cancellations(
    num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "INSIST_SECONDS", 0.01)
    out: list[str] = []
    async with asyncio.timeout(60), owned_task(deaf(num_lost, out)):
        await asyncio.sleep(0)
    assert out == ["out"]


async def test_a_scope_that_is_cancelled_while_its_task_ends_waits_for_it_and_ends_cancelled() -> (
    None
):
    left = asyncio.Event()
    may_leave = asyncio.Event()

    async def slow_to_leave() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
            with pytest.raises(asyncio.CancelledError):
                await may_leave.wait()
            await may_leave.wait()

    task = asyncio.create_task(slow_to_leave())
    await asyncio.sleep(0)
    owner = asyncio.create_task(end(task))
    await left.wait()
    owner.cancel()
    await asyncio.sleep(0)
    assert not owner.done()
    may_leave.set()
    await asyncio.wait({owner}, timeout=60)
    assert owner.cancelled()
    assert task.cancelled()


async def test_what_a_task_failed_of_is_raised_where_its_scope_ends() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with owned_task(fails()):
            await asyncio.sleep(0)


class Calls:
    """Calls in succession, each of which lets the next one start when it is told to, and ends when
    it is told to."""

    def __init__(self, count: int) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.may_go_on = [asyncio.Event() for _ in range(count)]
        self.may_end = [asyncio.Event() for _ in range(count)]
        self.error: Exception | None = None
        self.run = asyncio.create_task(in_succession([self._call(i) for i in range(count)]))

    def _call(self, number: int) -> Callable[[Callable[[], None]], Coroutine[Any, Any, None]]:
        async def call(go_on: Callable[[], None]) -> None:
            self.started.append(number)
            try:
                await self.may_go_on[number].wait()
                go_on()
                await self.may_end[number].wait()
                if self.error is not None:
                    raise self.error
            finally:
                self.ended.append(number)

        return call

    def let_go_on(self, first: int, end: int) -> None:
        for event in self.may_go_on[first:end]:
            event.set()


async def counts_of(values: list[int], passes: int) -> list[int]:
    """By how many the list grew in each of the next passes of the event loop."""
    lengths = [len(values)]
    for _ in range(passes):
        await asyncio.sleep(0)
        lengths.append(len(values))
    return [after - before for before, after in itertools.pairwise(lengths)]


async def test_a_call_starts_when_the_one_before_lets_it_and_in_a_pass_of_its_own() -> None:
    calls = Calls(1000)
    await asyncio.sleep(0.01)
    assert calls.started == [0], "none has let the next one start"
    calls.let_go_on(0, 20)
    assert set(await counts_of(calls.started, 100)) == {0, 1}
    assert calls.started == list(range(21))
    calls.may_end[20].set()
    calls.let_go_on(20, 21)
    await counts_of(calls.started, 10)
    assert calls.started == list(range(22))
    assert calls.ended == [20]
    calls.let_go_on(0, 1000)
    for event in calls.may_end:
        event.set()
    await calls.run
    assert calls.started == list(range(1000))
    assert sorted(calls.ended) == list(range(1000))


async def test_a_call_that_ends_without_a_word_lets_the_next_one_start() -> None:
    ended: list[int] = []

    def call(number: int) -> Callable[[Callable[[], None]], Coroutine[Any, Any, None]]:
        async def end_at_once(_: Callable[[], None]) -> None:
            ended.append(number)

        return end_at_once

    await in_succession([call(i) for i in range(50)])
    assert ended == list(range(50))
    await in_succession([])


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["failed", "cancelled"])
async def test_a_thousand_calls_end_a_few_in_a_pass_and_none_starts_any_more(
    is_cancelled: bool,
) -> None:
    calls = Calls(1000)
    calls.let_go_on(0, 400)
    await counts_of(calls.started, 1500)
    assert len(calls.started) == 401
    if is_cancelled:
        calls.run.cancel()
    else:
        calls.error = ZeroDivisionError()
        calls.may_end[7].set()
    assert max(await counts_of(calls.ended, 20)) <= ENDED_AT_ONCE, "others' work goes between"
    with pytest.raises(asyncio.CancelledError if is_cancelled else ZeroDivisionError):
        await calls.run
    assert sorted(calls.ended) == list(range(401)) == calls.started


async def test_being_cancelled_again_ends_no_wait_for_calls_that_end() -> None:
    calls = Calls(100)
    calls.let_go_on(0, 100)
    await counts_of(calls.started, 400)
    calls.run.cancel()
    await asyncio.sleep(0)
    calls.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls.run
    assert sorted(calls.ended) == list(range(100))
