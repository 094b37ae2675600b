from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.kv.block_source import Ticket
from headwater.engine_core.kv.prefix_cache import HashChain
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.seating.waiting_queue import WaitingQueue
from headwater.engine_core.scheduling.table.request_state import Rank, RequestState


def request(
    key: int, *, rank: Rank | None = None, credit: int = 1, num_uncached: int = 10
) -> RequestState:
    return RequestState(
        key=key,
        rank=rank or (0, 0.0, key),
        sampling=SamplingParams(),
        choice_index=0,
        has_grammar=False,
        num_prompt_tokens=10,
        max_len=20,
        token_ids=np.arange(10, dtype=np.int32),
        chain=HashChain(b"\0" * 16),
        credit=credit,
        added_at=0.0,
        num_uncached_tokens=num_uncached,
    )


def drain(queue: WaitingQueue) -> list[int]:
    keys = []
    while (first := queue.peek()) is not None:
        queue.pop(first)
        keys.append(first.key)
    return keys


def queue_of(*requests: RequestState) -> WaitingQueue:
    queue = WaitingQueue()
    for each in requests:
        queue.push(each)
    return queue


def test_tier_goes_before_virtual_time_and_both_before_arrival() -> None:
    ranks = [(1, 0.0, 0), (0, 5.0, 1), (0, 2.0, 3), (0, 2.0, 2)]
    queue = queue_of(*(request(key, rank=rank) for key, rank in enumerate(ranks)))
    assert drain(queue) == [3, 2, 1, 0]


def test_a_request_without_credit_is_held_until_some_comes() -> None:
    held = request(0, credit=0)
    queue = queue_of(held, request(1))
    assert len(queue) == 2
    assert drain(queue) == [1]
    queue.add_credit(held, 3)
    assert held.credit == 3
    assert drain(queue) == [0]


def test_a_follower_is_held_until_its_leader_has_scheduled_what_they_share() -> None:
    leader = request(9)
    queue = queue_of(request(0), request(1))
    for num_blocks in (4, 2):
        first = queue.peek()
        assert first is not None
        queue.await_leader(leader, first, num_blocks)
    assert queue.peek() is None
    assert len(queue) == 2
    queue.leader_advanced(leader, 1)
    assert queue.peek() is None
    queue.leader_advanced(leader, 3)
    assert drain(queue) == [1]
    queue.leader_left(leader)
    assert drain(queue) == [0]


def test_a_follower_that_is_removed_does_not_come_back() -> None:
    leader = request(9)
    follower = request(0)
    queue = queue_of(follower)
    queue.await_leader(leader, follower, 1)
    queue.remove(follower)
    queue.leader_left(leader)
    assert queue.peek() is None
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_a_request_that_is_removed_waits_for_no_load_any_more() -> None:
    removed = request(0)
    other = request(1)
    ticket = Ticket([b"h" * 16], [1])
    removed.token_ids = np.arange(removed.num_prompt_tokens + 1, dtype=np.int32)
    queue = queue_of(removed, other)
    queue.await_load(removed, ticket)
    queue.await_load(other, ticket)
    assert queue.awaits_begun
    queue.remove(removed)
    assert (queue.awaits(ticket), queue.awaits_begun) == (True, False)
    queue.remove(other)
    assert (queue.awaits(ticket), queue.awaits_any_load) == (False, False)
    assert queue.load_ended(ticket) == []


@given(
    st.sets(st.sampled_from("abc")),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["push", "pop", "remove"]), st.integers(0, 50))
    ),
)
def test_it_pops_in_order_whatever_is_removed_between(
    full: set[str], steps: list[tuple[int, str, int]]
) -> None:
    """`full` have their share: the others of a tier go first."""

    def turn(each: RequestState) -> tuple[int, bool, Rank]:
        return each.rank[0], each.tenant in full, each.rank

    queue = WaitingQueue(lambda each: each.tenant in full)
    model = list[RequestState]()
    for arrival, (tier, verb, choice) in enumerate(steps):
        if verb == "push":
            model.append(request(arrival, rank=(tier, 0.0, arrival), num_uncached=choice))
            model[-1].tenant = "abc"[choice % 3]
            queue.push(model[-1])
        elif model and verb == "pop":
            first = min(model, key=turn)
            assert queue.peek() is first
            queue.pop(first)
            model.remove(first)
        elif model:
            queue.remove(model.pop(choice % len(model)))
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(each.num_uncached_tokens for each in model)
    assert drain(queue) == [each.key for each in sorted(model, key=turn)]


def test_a_request_that_waits_long_rises_a_tier_at_a_time_and_never_past_the_first() -> None:
    low = request(0, rank=(2, 0.0, 0))
    first = request(1, rank=(0, 9.0, 1))
    middle = request(2, rank=(1, 1.0, 2))
    middle.added_at = 20.0
    queue = queue_of(low, first, middle)
    for now in (29.0, 31.0, 45.0):
        queue.rise(now)
    assert [each.rank[0] for each in (low, first, middle)] == [1, 0, 1]
    queue.rise(61.0)
    assert [each.rank[0] for each in (low, first, middle)] == [0, 0, 0]
    assert drain(queue) == [0, 2, 1]
