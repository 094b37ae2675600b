from __future__ import annotations

import asyncio

import pytest

from headwater.services import runtime
from headwater.services.runtime import end, owned_task


async def deaf(num_lost: int, out: list[str]) -> None:
    """Loses so many cancellations, as `asyncio.wait_for` does now and then, and then takes its time to leave."""
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
async def test_a_scope_ends_though_its_task_loses_cancellations(num_lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INSIST_SECONDS", 0.01)
    out: list[str] = []
    async with asyncio.timeout(20), owned_task(deaf(num_lost, out)):
        await asyncio.sleep(0)
    assert out == ["out"]


async def test_who_is_cancelled_while_a_task_of_his_ends_waits_for_it_and_ends_cancelled() -> None:
    left, may_leave = asyncio.Event(), asyncio.Event()

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
    await asyncio.wait({owner}, timeout=20)
    assert owner.cancelled()
    assert task.cancelled()


async def test_what_a_task_failed_of_is_raised_where_its_scope_ends() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with owned_task(fails()):
            await asyncio.sleep(0)
