from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.engine_core.first_come import FirstComeFirstServed
from headwater.engine_core.tenant_turns import TenantTurns


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 5)), min_size=1, max_size=20))
def test_in_order_of_arrival_each_wait_is_what_it_was(requests: list[tuple[int, float]]) -> None:
    queue = FirstComeFirstServed()
    arrivals = [queue.enter(num_tokens, 0.0) for num_tokens, _ in requests]
    now = 0.0
    for arrival, (_, seconds) in zip(arrivals, requests, strict=True):
        now += seconds
        assert queue.leave(arrival, now) == now


def test_an_overtaken_request_would_have_started_with_the_first_one() -> None:
    queue = FirstComeFirstServed()
    long_one = queue.enter(100, 0.0)
    short = queue.enter(10, 1.0)
    assert queue.leave(short, 3.0) > 3.0 - 1.0
    assert queue.leave(long_one, 8.0) == 3.0


def test_requests_that_have_left_are_forgotten() -> None:
    queue = FirstComeFirstServed()
    for now in range(1000):
        first = queue.enter(5, now)
        second = queue.enter(1, now)
        queue.leave(second, now + 0.5)
        queue.leave(first, now + 0.6)
    assert len(queue._unreached) == 0


def test_a_tenant_s_time_is_that_of_what_it_was_given_in_whatever_order() -> None:
    turns = TenantTurns()
    for at, cost in ((0.0, 10.0), (10.0, 2.0), (12.0, 3.0)):
        turns.enter("a", at, cost)
    turns.enter("b", 4.0, 1.0)
    assert turns.virtual_time("a") == 0.0
    turns.leave("a", 2.0)
    assert turns.virtual_time("a") == 2.0
    turns.leave("a", 3.0)
    assert turns.virtual_time("a") == 5.0 > turns.virtual_time("b")
    turns.leave("a", 10.0)
    turns.enter("a", 15.0, 1.0)
    assert turns.virtual_time("a") == 15.0
