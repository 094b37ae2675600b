"""Turns of models on one device: within its memory, fair, without starvation, with honest
estimates, and with a bound on the time that goes into switching."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.stack.turn_policy import (
    BURST_SWITCHES,
    EXPECTED_SWITCH,
    SWITCHING_SHARE,
    ModelSight,
    Switch,
    TurnPolicy,
    Waiting,
)
from tests.services.stack.turn_world import TICK, TurnWorld

QUANTUM_OF_EXPECTED = EXPECTED_SWITCH * (1 / SWITCHING_SHARE - 1)


def two_models(**changes: Any) -> TurnWorld:
    return TurnWorld({"a": 60, "b": 60}, resident_bytes=100, **changes)


def test_a_model_that_fits_wakes_at_once_and_nothing_falls_asleep() -> None:
    policy = TurnPolicy(100, now=0.0)
    sights = [
        ModelSight(name="a", num_bytes=40, is_awake=True, has_work=True),
        ModelSight(name="b", num_bytes=60, is_awake=False, waiting={"x": Waiting(0.0)}),
    ]
    policy.look(sights, 0.1)
    assert policy.decide(sights, 0.1) == Switch((), "b")
    assert policy.decide(sights, 0.2) is None


def test_an_idle_model_makes_room_at_once_and_a_busy_one_after_its_quantum() -> None:
    world = two_models()
    world.ask("a", "x", 0.2)
    world.run(2)
    idle = world.ask("b", "y", 100)
    world.run(1)
    assert idle.first_served_at == pytest.approx(idle.arrived_at + 0.45, abs=0.1)
    busy = world.ask("a", "x", 1)
    world.run(20)
    assert busy.first_served_at is not None
    turn = busy.first_served_at - 0.4 - idle.first_served_at
    # It shrinks while switches turn out cheaper than they were taken to be.
    assert world.policy.quantum <= turn <= QUANTUM_OF_EXPECTED


def test_a_pinned_model_stays_awake() -> None:
    world = TurnWorld({"a": 40, "b": 60, "c": 60}, 100, pinned=frozenset({"a"}), awake={"a"})
    for model in ("b", "c"):
        world.ask(model, "x", 50)
    world.run(60)
    assert "a" in world.awake
    assert {each.model for each in world.requests if each.first_served_at} == {"b", "c"}


def test_an_engine_that_came_back_awake_falls_asleep_where_there_is_no_room() -> None:
    policy = TurnPolicy(100, now=0.0)
    sights = [
        ModelSight(name="a", num_bytes=60, is_awake=True, has_work=True),
        ModelSight(name="b", num_bytes=60, is_awake=True),
    ]
    policy.look(sights, 0.1)
    assert policy.decide(sights, 0.1) == Switch(("b",), "")
    pinned = [replace(each, is_pinned=True) for each in sights]
    assert TurnPolicy(100, now=0.0).decide(pinned, 0.1) is None


def test_tenants_with_one_model_and_with_two_get_the_same_time() -> None:
    world = TurnWorld({"a": 60, "b": 60, "c": 60}, resident_bytes=100)
    for model, tenant in (("a", "x"), ("b", "y"), ("c", "y")):
        world.ask(model, tenant, 10_000)
    world.run(600)
    assert world.served["x"] == pytest.approx(world.served["y"], rel=0.1)


def test_a_tenant_of_twice_the_weight_gets_twice_the_time() -> None:
    world = two_models(weights={"x": 2.0})
    world.ask("a", "x", 10_000)
    world.ask("b", "y", 10_000)
    world.run(300)
    assert world.served["x"] == pytest.approx(2 * world.served["y"], rel=0.1)


def test_a_tenant_that_joins_a_model_which_is_awake_is_served_as_well() -> None:
    world = two_models()
    world.ask("a", "x", 10_000)
    world.run(2)
    world.ask("a", "y", 10_000)
    world.ask("b", "z", 10_000)
    world.run(300)
    # Both of `a` get half of its time, and thus as much as `z` with two turns of three.
    assert world.served["y"] == pytest.approx(world.served["z"], rel=0.1)


def test_a_tenant_that_is_away_for_a_moment_has_still_been_served() -> None:
    world = TurnWorld(dict.fromkeys("abc", 60), resident_bytes=100)
    world.ask("a", "x", 10_000)
    while world.now < 150:
        asked = [world.ask(name, "y", 4.0) for name in "bc"]
        while any(each in world.requests for each in asked):
            world.tick()
        world.run(0.2)
    # Were it forgotten each time, it had 2.7 times as much.
    assert world.served["y"] == pytest.approx(world.served["x"], rel=0.15)


def test_a_large_model_is_not_passed_by_for_ever() -> None:
    world = TurnWorld({"large": 100, "a": 50, "b": 50, "c": 50}, resident_bytes=100)
    for model in ("a", "b", "c"):
        world.ask(model, "x", 10_000)
    world.run(20)
    large = world.ask("large", "x", 10)
    world.run(60)
    assert large.first_served_at is not None


def test_a_long_turn_without_others_waiting_does_not_lengthen_estimates() -> None:
    world = TurnWorld(dict.fromkeys("abc", 60), resident_bytes=100)
    world.ask("a", "x", 10_000)
    world.run(180)
    world.ask("b", "x", 10_000)
    world.run(1)
    assert world.awake == {"b"}
    # `c` waits for the turn of `b` and for one of `a`, which was awake for 180 s before.
    late = world.ask("c", "x", 1)
    world.run(40)
    assert late.first_served_at is not None
    assert late.estimate <= 2 * (QUANTUM_OF_EXPECTED + EXPECTED_SWITCH)


def test_a_model_that_cannot_fit_keeps_no_other_from_its_turn() -> None:
    sizes = {"pinned": 40, "large": 70, "a": 60, "b": 60}
    world = TurnWorld(sizes, 100, pinned=frozenset({"pinned"}), awake={"pinned"})
    for model in ("large", "a", "b"):
        world.ask(model, model, 10_000)
    world.run(100)
    assert world.served["a"] == pytest.approx(world.served["b"], rel=0.3)


def run_at_random(seed: int, seconds: float) -> TurnWorld:
    """Requests of four tenants for five models, as many as the device can compute or more."""
    source = random.Random(seed)
    sizes = {f"m{i}": source.choice([20, 40, 60]) for i in range(5)}
    world = TurnWorld(sizes, 100, switch_seconds=source.choice([0.1, 0.4, 1.5]))
    rate = source.choice([0.1, 0.5, 2.0])
    end = world.now + seconds
    while world.now < end:
        if source.random() < rate * 0.05:
            model = source.choices(list(sizes), [8, 4, 2, 1, 1])[0]
            world.ask(model, source.choice("wxyz"), source.choice([0.1, 0.5, 2.0]))
        world.tick()
    return world


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1 << 20))
def test_switching_takes_its_share_and_no_request_starves(seed: int) -> None:
    world = run_at_random(seed, 240)
    most = SWITCHING_SHARE * world.now + (BURST_SWITCHES + 1) * max(1.0, world.switch_seconds)
    assert world.switching_seconds <= most
    # Each of the five models has its turn twice at most before a request's own model has one: the
    # tenants of others may have been served less so far. 6.6 turns were the most of 105 seeds.
    turn = max(EXPECTED_SWITCH, world.switch_seconds) * (1 / SWITCHING_SHARE - 1)
    # A world sees what happened a tick later.
    longest = 10 * (turn + world.switch_seconds) + TICK
    waits = [
        (each.first_served_at or world.now) - each.arrived_at
        for each in [*world.done, *world.requests]
    ]
    assert max(waits, default=0.0) <= longest


def test_estimates_are_within_a_third_where_all_models_are_busy() -> None:
    world = TurnWorld(dict.fromkeys("abcd", 60), resident_bytes=100)
    for name in "abcd":
        world.ask(name, name, 10_000)
    world.run(200)
    errors = []
    for _ in range(12):
        asleep = [name for name in "abcd" if name not in world.awake]
        estimates = {
            name: world.policy.wait_seconds(name, world.sights(), world.now) for name in asleep
        }
        asked_at = world.now
        woke: dict[str, float] = {}
        while len(woke) < len(asleep):
            world.tick()
            for name in set(asleep) & world.awake - woke.keys():
                woke[name] = world.now - asked_at
        errors += [abs(estimates[name] - woke[name]) / woke[name] for name in asleep]
        world.run(3.7)
    assert max(errors) < 0.3
