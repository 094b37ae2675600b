from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.gateway.router.breaker import Breaker
from headwater.gateway.router.load import InFlight, Load
from headwater.gateway.router.rates import pooled
from headwater.gateway.router.trust import FLOOR, Trust
from headwater.services.runtime.member import ReplicaLoad


def test_what_was_sent_counts_at_once_and_decays_as_it_must_be_computed_by_now() -> None:
    load = Load()
    load.add(1000, 10, 0.0)
    load.add(500, 5, 0.0)
    assert load.drain_tokens(0.0, 100.0) == 1500
    assert load.drain_tokens(4.0, 100.0) == 1100


def test_progress_ends_short_of_a_request_that_has_not_started() -> None:
    load = Load()
    first = load.add(1000, 10, 0.0)
    load.add(500, 5, 0.0)
    assert load.drain_tokens(60.0, 100.0) == 1500 - 950
    load.started(first, 60.0)
    assert load.drain_tokens(60.0, 100.0) == 500


def test_a_report_adds_what_others_sent_and_never_counts_ours_twice() -> None:
    load = Load()
    load.add(1000, 10, 0.0)
    load.report(ReplicaLoad(num_prefill_tokens=1000), 0.1)
    assert load.drain_tokens(0.1, 0.0) == 1000
    load.report(ReplicaLoad(num_prefill_tokens=3000), 0.2)
    assert load.drain_tokens(0.2, 0.0) == 3000
    assert load.drain_tokens(10.2, 100.0) == 1000 - 950 + 1000


def test_a_report_that_knows_nothing_of_a_fresh_request_does_not_erase_it_but_of_an_old_one_it_does() -> (
    None
):
    load = Load()
    load.add(1000, 10, 0.0)
    load.report(ReplicaLoad(), 0.5)
    assert load.drain_tokens(0.5, 0.0) == 1000
    load.report(ReplicaLoad(), 1.5)
    assert load.drain_tokens(1.5, 0.0) == 0
    assert load.num_requests == 1


def test_blocks_of_a_request_count_here_until_it_starts_and_there_from_then_on() -> None:
    load = Load()
    request = load.add(160, 11, 0.0)
    load.report(ReplicaLoad(num_used_blocks=100), 0.1)
    assert load.used_blocks() == 111
    load.started(request, 0.2)
    assert load.used_blocks() == 100


@given(
    st.lists(st.tuples(st.sampled_from(("add", "start", "end")), st.integers(1, 500)), max_size=60)
)
def test_whatever_happens_the_account_ends_at_zero(steps: list[tuple[str, int]]) -> None:
    load = Load()
    running = list[InFlight]()
    now = 0.0
    for verb, number in steps:
        now += number / 100
        if verb == "add":
            running.append(load.add(number, number // 16, now))
        elif running and verb == "start":
            load.started(running[number % len(running)], now)
        elif running:
            load.ended(running.pop(number % len(running)), now)
        assert load.drain_tokens(now, 50.0) >= 0
        assert load.num_requests == len(running)
    for request in running:
        load.ended(request, now)
    assert (load.drain_tokens(now, 50.0), load.used_blocks(), load.num_requests, load.batch()) == (
        0,
        0,
        0,
        0,
    )


def test_rates_are_the_mean_of_replicas_that_know_theirs() -> None:
    rates = pooled(
        [
            ReplicaLoad(
                prefill_tps=900, itl_seconds=0.030, itl_seconds_per_request=0.001, num_running=10
            ),
            ReplicaLoad(prefill_tps=1100, itl_seconds=0.022),
            ReplicaLoad(),
        ]
    )
    assert rates.prefill_tps == 1000
    assert rates.itl_per_request == 0.001
    assert rates.itl(10) == pytest.approx((0.020 + 0.021) / 2 + 0.010)


def test_trust_follows_outcomes_and_a_surplus_does_not_make_up_for_a_miss() -> None:
    trust = Trust()
    trust.observe(100, 0)
    assert trust.value == pytest.approx(0.9)
    trust.observe(100, 500)
    assert trust.value == pytest.approx(0.91)
    trust.observe(0, 0)
    assert trust.value == pytest.approx(0.91)
    for _ in range(100):
        trust.observe(100, 0)
    assert trust.value == FLOOR


def test_a_breaker_lets_one_request_try_after_each_pause_and_the_pauses_grow() -> None:
    breaker = Breaker()
    for now in (0.0, 0.001, 0.002):
        breaker.failed(now)
    assert breaker.is_open(0.9)
    assert not breaker.is_open(1.1)
    breaker.sent(1.1)
    assert breaker.is_open(1.2)
    breaker.failed(1.3)
    assert breaker.is_open(3.2)
    assert not breaker.is_open(3.4)
    breaker.sent(3.4)
    breaker.succeeded()
    assert not breaker.is_open(3.5)
