from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headwater.gateway.tenancy.answer_lengths import (
    FIRST_PREDICTION,
    LEAST_SEEN,
    AnswerLengths,
    RunningQuantile,
)


def test_a_prediction_is_the_median_of_the_tenants_answers_at_the_endpoint() -> None:
    lengths = AnswerLengths()
    assert lengths.predict("ada", "chat", 4096) == FIRST_PREDICTION
    for length in (10, 1000, 12, 1100, 11) * LEAST_SEEN:
        lengths.add("ada", "chat", length)
        lengths.add("ada", "completions", 5 * length)
    for _ in range(LEAST_SEEN):
        lengths.add("bob", "chat", 500)
    assert 10 <= lengths.predict("ada", "chat", 4096) <= 16
    assert 50 <= lengths.predict("ada", "completions", 4096) <= 75
    assert 500 <= lengths.predict("bob", "chat", 4096) <= 620


def test_a_new_tenant_is_taken_for_one_like_the_others() -> None:
    lengths = AnswerLengths()
    for _ in range(10):
        lengths.add("ada", "chat", 700)
    lengths.add("eve", "chat", 3)
    assert lengths.predict("eve", "chat", 4096) == lengths.predict("ada", "chat", 4096) >= 700


def test_max_tokens_bounds_a_prediction_and_a_hint_replaces_it() -> None:
    lengths = AnswerLengths()
    for _ in range(10):
        lengths.add("ada", "chat", 700)
    assert lengths.predict("ada", "chat", 50) == 50
    assert lengths.predict("ada", "chat", 4096, hint=20) == 20
    assert lengths.predict("ada", "chat", 50, hint=9000) == 50


def test_old_answers_fade() -> None:
    lengths = AnswerLengths()
    for length in [100] * 300 + [1000] * 60:
        lengths.add("ada", "chat", length)
    assert lengths.predict("ada", "chat", 4096) >= 1000


def test_memory_is_bounded_however_many_tenants_name_themselves() -> None:
    lengths = AnswerLengths(max_keys=10)
    for number in range(1000):
        lengths.add(f"tenant {number}", "chat", 5)
    assert len(lengths) == 10
    assert lengths.predict("tenant 0", "chat", 4096) == 5, "those of all tenants are kept"


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.sampled_from([0.1, 0.5, 0.9])
)
def test_a_quantile_is_a_length_that_was_seen_or_a_fifth_more(
    values: list[int], quantile: float
) -> None:
    running = RunningQuantile()
    for value in values:
        running.add(value)
    found = running.value(quantile)
    assert any(value <= found <= 1.2 * value + 1 for value in values)


def test_weights_stay_finite_however_many_answers_there_are() -> None:
    running = RunningQuantile()
    dice = random.Random(1)
    for _ in range(20_000):
        running.add(dice.randint(90, 110))
    assert 80 <= running.value(0.5) <= 130
