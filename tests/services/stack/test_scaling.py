"""When a replica is started and when one is stopped, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.services.runtime.settings import SettingError
from headwater.services.stack.scaling import UP_SECONDS, Scaler, ScaleRules, Sight

TICK = 0.25


class Model:
    """Replicas that come and go as they are wanted."""

    def __init__(self, **rules: Any) -> None:
        self.rules = ScaleRules(
            **{"min_replicas": 0, "max_replicas": 4, "idle_seconds": 10.0, "target_requests": 8}
            | rules
        )
        self.scaler = Scaler(self.rules, 0.0)
        self.now = 0.0
        self.replicas = self.rules.min_replicas
        self.changes: list[tuple[float, int]] = []

    def tick(self, requests: int = 0, *, busy: bool = False, starting: bool = False) -> int:
        """One look at so many requests; those who find no replica wait for one."""
        self.now += TICK
        without, placed = (0, requests) if self.replicas else (requests, 0)
        sight = Sight(
            num_replicas=self.replicas,
            num_without_replica=without,
            num_requests=placed,
            was_busy=busy,
            is_starting=starting,
        )
        wanted = self.scaler.wanted(sight, self.now)
        if wanted != self.replicas:
            self.changes.append((self.now, wanted - self.replicas))
        self.replicas = wanted
        return wanted

    def run(self, seconds: float, requests: int = 0, *, busy: bool = False) -> int:
        for _ in range(int(seconds / TICK)):
            self.tick(requests, busy=busy)
        return self.replicas


def test_the_first_request_for_a_model_without_a_replica_starts_one_at_once() -> None:
    model = Model()
    assert model.run(60) == 0
    assert model.tick(1) == 1


def test_a_replica_that_is_idle_long_enough_is_stopped_and_a_request_meanwhile_keeps_it() -> None:
    model = Model()
    model.tick(1)
    model.run(9)
    model.tick(1)
    assert model.run(9) == 1
    model.tick(0, busy=True)
    assert model.run(9) == 1, "a short request between two looks counts too"
    assert model.run(1.25) == 0


def test_a_load_that_lasts_gets_as_many_as_it_needs_and_a_moment_of_it_none() -> None:
    model = Model()
    model.run(30, requests=4)
    for _ in range(10):
        model.run(UP_SECONDS - 2 * TICK, requests=30)
        assert model.run(1, requests=4) == 1
    assert model.run(UP_SECONDS + TICK, requests=20) == 3
    assert model.run(60, requests=1000) == 4


def test_none_is_stopped_while_one_starts_however_long_that_takes() -> None:
    model = Model()
    model.tick(1)
    assert {model.tick(starting=True) for _ in range(400)} == {1}
    assert model.run(9.75) == 1
    assert model.run(0.5) == 0


@pytest.mark.parametrize(
    ("load", "kept"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (13, 4)]
)
def test_a_lower_load_keeps_as_many_replicas_as_it_half_fills(load: int, kept: int) -> None:
    model = Model()
    model.run(30, requests=1000)
    assert model.run(9, requests=load) == 4
    assert model.run(30, requests=load) == kept


def test_a_fixed_number_stays_whatever_comes() -> None:
    model = Model(min_replicas=2, max_replicas=2)
    assert {model.run(60, requests) for requests in (0, 1, 1000, 0)} == {2}
    assert model.changes == []


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=30), st.integers(0, 2))
def test_it_never_flaps(phases: list[tuple[int, int]], least: int) -> None:
    model = Model(min_replicas=least)
    for ticks, requests in phases:
        for _ in range(ticks):
            assert least <= model.tick(requests) <= 4
    for (before, up), (after, down) in zip(model.changes, model.changes[1:], strict=False):
        assert after - before >= (model.rules.idle_seconds if down < 0 else UP_SECONDS) or (
            up < 0 < down
        )
        # What was given up is not called back by the load that was there when it was given up.
    assert all(change for _, change in model.changes)


@given(st.integers(0, 60))
def test_a_steady_load_settles(requests: int) -> None:
    model = Model()
    model.run(60, requests)
    settled = model.replicas
    assert {model.tick(requests) for _ in range(400)} == {settled}


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_replicas": -1},
        {"max_replicas": 0},
        {"min_replicas": 5},
        {"idle_seconds": 0},
        {"target_requests": 0},
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        SettingError, match=r"--(min|max)-replicas|--idle-seconds|--target-requests"
    ):
        Model(**wrong)


@pytest.mark.parametrize(
    ("least", "most", "bounds"),
    [
        (None, None, (1, 2)),
        (0, None, (0, 2)),
        (4, None, (4, 4)),
        (None, 5, (1, 5)),
        (2, 3, (2, 3)),
        (0, 1, (0, 1)),
    ],
)
def test_a_bound_that_is_given_moves_the_other_only_where_they_would_cross(
    least: int | None, most: int | None, bounds: tuple[int, int]
) -> None:
    rules = ScaleRules(min_replicas=1, max_replicas=2).with_bounds(least, most)
    assert (rules.min_replicas, rules.max_replicas) == bounds


def test_bounds_that_no_model_can_have_are_refused() -> None:
    with pytest.raises(SettingError, match="--max-replicas is 1; allowed: at least 3"):
        ScaleRules(min_replicas=1, max_replicas=2).with_bounds(3, 1)
