"""Turns: so many at once, in order, none lost."""

from __future__ import annotations

import asyncio

import pytest

from headwater.gateway.request.admission import Admission, Turn
from headwater.services.runtime.errors import LimitExceeded


async def hold(admission: Admission, tier: int, log: list[int], release: asyncio.Event) -> None:
    with await admission.take(tier):
        log.append(tier)
        await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_lower_tier_goes_first_and_within_one_the_first_request() -> None:
    admission = Admission(1, 10)
    log = list[int]()
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, tier, log, release)) for tier in (5, 2, 1, 2, 0)]
    await settle()
    assert (log, admission.num_running, admission.num_queued) == ([5], 1, 4)
    release.set()
    await asyncio.gather(*tasks)
    assert log == [5, 0, 1, 2, 2]
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    admission = Admission(1, 1)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, 0, [], release)) for _ in range(2)]
    await settle()
    with pytest.raises(LimitExceeded) as refused, await admission.take(0):
        pass
    assert refused.value.retry_after == 1.0
    release.set()
    await asyncio.gather(*tasks)


async def test_in_a_full_queue_the_tenant_with_most_requests_loses_one_and_gets_no_more_in() -> (
    None
):
    admission = Admission(1, 4)
    log = list[str]()
    release = asyncio.Event()

    async def wait(tenant: str, tier: int = 0) -> None:
        with await admission.take(tier, tenant=tenant):
            log.append(tenant)
            await release.wait()

    tasks = [asyncio.create_task(wait("abuser", tier)) for tier in range(5)]
    await settle()
    with pytest.raises(LimitExceeded):
        admission.reject_early("abuser")
    with pytest.raises(LimitExceeded):
        await wait("abuser")
    for _ in range(2):
        admission.reject_early("ada")
        tasks.append(asyncio.create_task(wait("ada")))
        await settle()
    assert [task.done() for task in tasks] == [False, False, False, True, True, False, False]
    with pytest.raises(LimitExceeded):
        admission.reject_early("ada")
    assert admission.num_queued == 4
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log == ["abuser", "ada", "ada", "abuser", "abuser"]
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_in_a_full_queue_a_place_is_free_when_all_of_the_greediest_were_cancelled() -> None:
    """Revoking a key cancels its requests, possibly in the pass of the event loop in which another
    request arrives."""
    admission = Admission(1, 3)
    release = asyncio.Event()

    async def wait(tenant: str) -> None:
        with await admission.take(0, tenant=tenant):
            await release.wait()

    tasks = [asyncio.create_task(wait("revoked")) for _ in range(4)]
    await settle()
    newcomer = asyncio.create_task(wait("ada"))
    for task in tasks[1:]:
        task.cancel()
    release.set()
    await newcomer
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_the_turn_of_a_request_that_leaves_in_that_moment_goes_to_the_next() -> None:
    admission = Admission(1, 10)
    log = list[int]()
    release = asyncio.Event()
    first, second, third = (
        asyncio.create_task(hold(admission, tier, log, release)) for tier in (0, 1, 2)
    )
    await settle()
    first.cancel()
    await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert log == [0, 2]
    release.set()
    await third
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_request_that_leaves_the_queue_takes_no_turn() -> None:
    admission = Admission(1, 10)
    log = list[int]()
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, tier, log, release)) for tier in (0, 1, 2)]
    await settle()
    tasks[1].cancel()
    await settle()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log == [0, 2]
    assert admission.num_running == 0


async def test_the_tenant_that_got_least_goes_first_and_long_waits_rise_a_tier() -> None:
    now = 0.0
    admission = Admission(1, 10, clock=lambda: now)
    log = list[str]()
    release = asyncio.Event()

    async def wait(name: str, tier: int, virtual_time: float) -> None:
        with await admission.take(tier, virtual_time):
            log.append(name)
            await release.wait()

    tasks = [asyncio.create_task(wait("first", 0, 0.0))]
    for name, tier, virtual_time in (("low", 1, 0.0), ("much", 0, 9.0), ("little", 0, 3.0)):
        await settle()
        tasks.append(asyncio.create_task(wait(name, tier, virtual_time)))
    await settle()
    now = 31.0
    release.set()
    await asyncio.gather(*tasks)
    assert log == ["first", "low", "little", "much"]


async def test_a_model_without_room_keeps_only_its_own_requests_waiting_and_what_is_on_its_way_counts() -> (
    None
):
    room = {"full": 0, "free": 250}
    admission = Admission(
        10, 10, has_room=lambda model_key, num_tokens, _: num_tokens < room[model_key]
    )
    log = list[str]()
    release = asyncio.Event()

    async def wait(model_key: str, *, is_sent: bool) -> None:
        with await admission.take(0, model_key=model_key, num_tokens=100) as turn:
            log.append(model_key)
            if is_sent:
                turn.sent()
            await release.wait()

    tasks = [asyncio.create_task(wait("full", is_sent=False)) for _ in range(3)]
    tasks += [asyncio.create_task(wait("free", is_sent=number == 0)) for number in range(5)]
    await settle()
    # The first one is at a replica, three are on their way there: the fourth would be past the
    # room.
    assert (log, admission.num_queued) == (["free"] * 4, 4)
    assert (admission.waiting_tokens("full"), admission.waiting_tokens("free")) == (300, 100)
    assert admission.someone_waits.is_set()
    room["full"] = 150
    admission.give()
    await settle()
    assert log[4:] == ["full"] * 2
    tasks[2].cancel()
    room["free"] = 1000
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log[6:] == ["free"]
    admission.give()
    assert (admission.num_running, admission.num_queued, admission.waiting_tokens("full")) == (
        0,
        0,
        0,
    )
    assert not admission.someone_waits.is_set()


async def test_a_prompt_that_starts_makes_room_for_the_next_one() -> None:
    admission = Admission(100, 100, has_room=lambda _, __, num_prompts: num_prompts < 2)
    turns = list[Turn]()

    async def wait() -> None:
        turns.append(await admission.take(0))

    tasks = [asyncio.create_task(wait()) for _ in range(5)]
    await settle()
    assert len(turns) == 2
    for turn in turns:
        turn.sent()
    await settle()
    assert len(turns) == 2, "sent, not started"
    turns[0].started()
    turns[0].started()
    await settle()
    assert len(turns) == 3
    turns[1].release()
    await settle()
    assert len(turns) == 4
    for turn in turns:
        turn.release()
    await asyncio.gather(*tasks)
    turns[4].release()
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_tenant_finds_its_way_past_the_room_that_another_has_taken_with_a_few_prompts() -> (
    None
):
    admission = Admission(100, 100, has_room=lambda _, num_tokens, __: num_tokens < 200)
    log = list[str]()
    release = asyncio.Event()

    async def wait(tenant: str) -> None:
        with await admission.take(0, tenant=tenant, num_tokens=100) as turn:
            log.append(tenant)
            await release.wait()
            turn.started()
            turn.started()

    tasks = [asyncio.create_task(wait(tenant)) for tenant in [*["abuser"] * 10, *["ada"] * 6]]
    await settle()
    assert log == ["abuser"] * 2 + ["ada"] * 4
    release.set()
    await asyncio.gather(*tasks)
    assert (admission.num_running, admission.num_queued) == (0, 0)
