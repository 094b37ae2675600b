from __future__ import annotations

import pytest

from tests.simulation.chaos import run_seed


def check_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            run_seed(seed)
        except AssertionError as broken:
            pytest.fail(
                f"`python -m tests.simulation.chaos --first {seed} --story` repeats it: {broken}"
            )


@pytest.mark.slow
def test_after_ten_seeds_of_faults_answers_are_whole_and_everyone_agrees() -> None:
    check_seeds(range(10))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_after_five_hundred_seeds_of_faults_answers_are_whole_and_everyone_agrees() -> None:
    check_seeds(range(500))


def test_a_seed_of_faults_replays_exactly() -> None:
    one = run_seed(17)
    again = run_seed(17)
    other = run_seed(18)
    assert one.story == again.story
    assert one.digest != other.digest
