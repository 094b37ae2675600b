"""Samples of a gateway's figures, and their sums over all gateways."""

from __future__ import annotations

import pytest

from headwater.gateway.live.samples import MAX_SAMPLES, Samples, merged, next_sample

NAMES = (
    *("num_running", "num_waiting", "num_finished", "num_refused"),
    *("prompt_tokens", "cached_tokens", "output_tokens"),
)


def samples(*totals: dict[str, float]) -> Samples:
    """Samples of a gateway whose totals are read in this order; those that are not given are 0."""
    reported = iter([dict.fromkeys(NAMES, 0.0) | each for each in totals])
    kept = Samples(lambda: next(reported))
    for number, _ in enumerate(totals[1:], 7):
        kept.take(number)
    return kept


def test_a_sample_has_what_has_happened_since_the_one_before() -> None:
    kept = samples(
        {"output_tokens": 100.0},
        {"output_tokens": 400.0, "prompt_tokens": 40.0, "cached_tokens": 10.0},
        {"output_tokens": 460.0, "prompt_tokens": 40.0, "cached_tokens": 10.0, "num_running": 3.0},
    )
    first, second = merged([kept.all()])
    assert (first["at"], first["output_tokens"], first["cached_share"]) == (210, 10.0, 0.25)
    assert (second["at"], second["output_tokens"], second["num_running"]) == (240, 2.0, 3.0)
    assert second["cached_share"] is None


def test_gateways_are_added_up_and_one_that_came_later_counts_from_then_on() -> None:
    old = samples({}, {"num_finished": 30.0, "num_running": 1.0}, {"num_finished": 60.0})
    young = samples({}, {"num_finished": 60.0, "num_running": 2.0})
    first, second = merged([old.all(), young.all()])
    assert (first["num_finished"], first["num_running"]) == (3.0, 3.0)
    assert second["num_finished"] == 1.0


def test_the_oldest_samples_make_room() -> None:
    kept = samples(*[{}] * (MAX_SAMPLES + 10))
    assert len(kept.all()) == MAX_SAMPLES
    assert kept.all()[0].number == 7 + 9


def test_a_total_that_falls_is_no_negative_growth() -> None:
    kept = samples({"output_tokens": 50.0}, {"output_tokens": 20.0})
    assert merged([kept.all()])[0]["output_tokens"] == 0.0


@pytest.mark.parametrize(
    ("now", "number", "seconds"),
    [(60.0, 3, 30.0), (59.75, 3, 30.25), (75.0, 3, 15.0), (10.0, 1, 20.0)],
    ids=["at its end", "a little early", "between", "set back"],
)
def test_the_next_sample_is_of_the_half_minute_that_ends_next(
    now: float, number: int, seconds: float
) -> None:
    assert next_sample(now) == (number, seconds)


def test_samples_after_a_clock_was_set_back_take_the_places_of_those_before() -> None:
    totals = iter(
        [dict.fromkeys(NAMES, 0.0) | {"num_finished": 30.0 * number} for number in range(5)]
    )
    kept = Samples(lambda: next(totals))
    for number in (7, 8, 9, 8):
        kept.take(number)
    assert [each.number for each in kept.all()] == [7, 8]
    assert [row["num_finished"] for row in merged([kept.all()])] == [1.0, 1.0]
