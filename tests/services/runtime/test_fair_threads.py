"""Threads that tenants share: turns, bounded waits, callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from headwater.services.runtime.errors import LimitExceeded, Unavailable
from headwater.services.runtime.fair_queue import QueueLimits
from headwater.services.runtime.fair_threads import MUCH_SECONDS, FairThreads


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return "done"


@pytest.fixture
def held() -> Iterator[Held]:
    work = Held()
    yield work
    work.may_end.set()


def threads_of(num_threads: int, wait_seconds: float = 60.0) -> FairThreads:
    return FairThreads("work", num_threads, QueueLimits(num_waiting=2, wait_seconds=wait_seconds))


async def started(threads: FairThreads, tenant: str, held: Held) -> asyncio.Task[str]:
    task = asyncio.create_task(threads.run(tenant, 1, held))
    assert await asyncio.to_thread(held.has_begun.wait, 60)
    return task


async def test_another_tenant_does_not_wait_behind_work_that_lasts(held: Held) -> None:
    threads = threads_of(2)
    lasting = await started(threads, "a", held)
    behind = asyncio.create_task(threads.run("a", 1, lambda: "behind"))
    async with asyncio.timeout(60):
        assert await threads.run("b", 1, lambda: "quick") == "quick"
    assert not behind.done()
    held.may_end.set()
    assert await asyncio.gather(lasting, behind) == ["done", "behind"]
    threads.close()


async def test_a_wait_that_is_too_long_is_no_fault_of_the_work(held: Held) -> None:
    threads = threads_of(1, wait_seconds=0.05)
    lasting = await started(threads, "a", held)
    with pytest.raises(Unavailable, match=r"no turn for work came within 0\.05 s") as refused:
        await threads.run("b", 1, lambda: "late")
    assert (refused.value.code, refused.value.retry_after) == ("stage_busy", 0.05)
    # The work itself lasted longer than any wait may.
    held.may_end.set()
    assert await lasting == "done"
    assert await threads.run("b", 1, lambda: "now") == "now"
    threads.close()


async def test_a_tenant_whose_queue_is_full_is_refused_and_others_are_not(held: Held) -> None:
    threads = threads_of(1)
    lasting = await started(threads, "a", held)
    waiting = [asyncio.create_task(threads.run("a", 1, lambda: "own")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(LimitExceeded, match="2 requests of the tenant wait for work"):
        await threads.run("a", 1, lambda: "own")
    other = asyncio.create_task(threads.run("b", 1, lambda: "other"))
    await asyncio.sleep(0)
    held.may_end.set()
    assert await asyncio.gather(lasting, other, *waiting) == ["done", "other", "own", "own"]
    threads.close()


async def test_work_keeps_its_place_when_its_caller_leaves(held: Held) -> None:
    threads = threads_of(1)
    lasting = await started(threads, "a", held)
    lasting.cancel()
    waiting = asyncio.create_task(threads.run("a", 1, lambda: "next"))
    left = asyncio.create_task(threads.run("b", 1, lambda: pytest.fail("its caller has left")))
    await asyncio.sleep(0.01)
    left.cancel()
    assert not waiting.done()
    held.may_end.set()
    assert await waiting == "next"
    assert lasting.cancelled()
    threads.close()


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next_one(
    is_before: bool, held: Held
) -> None:
    """The caller leaves in the pass of the event loop in which its turn comes."""
    threads = threads_of(1)
    lasting = await started(threads, "a", held)
    left, waiting = (asyncio.create_task(threads.run("b", 1, lambda: "b")) for _ in range(2))
    await asyncio.sleep(0.01)
    held.may_end.set()
    # The event loop does nothing meanwhile, and finds the end of the work in its next pass.
    time.sleep(0.1)  # noqa: ASYNC251
    if is_before:
        left.cancel()
    else:
        asyncio.get_running_loop().call_soon(left.cancel)
    async with asyncio.timeout(60):
        assert await asyncio.gather(lasting, waiting) == ["done", "b"]
        assert left.cancelled()
        assert await threads.run("c", 1, lambda: "c") == "c"
    threads.close()


async def test_a_tenant_whose_work_took_a_third_of_a_second_has_had_much_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(FairThreads("a thread", 2)) as threads:
        await threads.run("a", 1, lambda: time.sleep(MUCH_SECONDS + 0.05))
        await threads.run("b", 1, lambda: None)
        await asyncio.sleep(0)
        assert threads.has_had_much("a")
        assert not threads.has_had_much("b")
        assert not threads.has_had_much("c")
        later = time.monotonic() + 60
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert not threads.has_had_much("a")


async def test_a_tenant_has_had_as_much_as_its_work_computed_and_not_as_long_as_it_waited() -> None:
    """On a busy machine the wait for a processor counted, so that quick work made way for all."""

    def wait() -> float:
        time.sleep(MUCH_SECONDS + 0.05)
        return 0.01

    with contextlib.closing(FairThreads("a thread", 2)) as threads:
        await threads.run("a", 1, wait, computed=lambda seconds: seconds)
        await threads.run("b", 1, lambda: MUCH_SECONDS + 0.05, computed=lambda seconds: seconds)
        await asyncio.sleep(0)
        assert not threads.has_had_much("a")
        assert threads.has_had_much("b")
