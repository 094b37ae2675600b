"""A cluster of real processes with faults: no answer changes, nothing is left behind, all processes
agree again in time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from headwater.services.runtime.kept_child import kept_child
from tests.simulation.cluster.faults import KINDS, NUM_FAULTS, schedule
from tests.simulation.cluster.processes import Shape

SAMPLE = (96, 138, 261)
"""Seeds of faults of eight kinds; both servers are emptied together in one of them."""
LEFT_OUT = {"slow", "empty_redis"}
NUM_LONG = 200


def break_it(*flags: str, patience: int = 3) -> list[dict[str, Any]]:
    """Outcomes of schedules on a cluster of its own. `patience`: times the seconds in which all
    agree again on a machine that is not busy."""
    program = [sys.executable, "-m", "tests.simulation.cluster"]
    command = [*program, f"--patience={patience}", "--fork", *flags]
    with kept_child(command) as child:
        text = list(child)
    outcomes = [json.loads(line) for line in text if line.startswith("{")]
    assert child.returncode == 0, [each for each in outcomes if each.get("wrong")] or "\n".join(
        text[-60:]
    )
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [SAMPLE[:1], pytest.param(SAMPLE, marks=pytest.mark.long)], ids=["one", "several"]
)
def test_whatever_dies_hangs_or_is_cut_off_no_answer_changes_and_nothing_is_left_behind(
    seeds: Sequence[int],
) -> None:
    # The time is judged by the long tests alone.
    patience = 15 if len(seeds) < len(SAMPLE) else 3
    *outcomes, end = break_it(*(f"--faults={seed}" for seed in seeds), patience=patience)
    assert end == {"run": len(seeds), "failed": []}
    seen = {fault.split()[2] for each in outcomes for fault in each["faults"]}
    assert len(seen) > 1
    assert seen == KINDS.keys() - LEFT_OUT or len(seeds) < len(SAMPLE)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_schedules_of_faults_hold() -> None:
    assert break_it(f"--schedules={NUM_LONG}")[-1] == {"run": NUM_LONG, "failed": []}


def test_a_seed_fixes_its_faults_and_leaves_one_of_each_stage_alone() -> None:
    shape = Shape()
    for seed in range(500):
        faults = schedule(seed, shape)
        assert faults == schedule(seed, shape)
        assert len(faults) == len({fault.target for fault in faults}) == NUM_FAULTS
        assert all(one.at <= other.at for one, other in pairwise(faults))
        hit = {fault.target for fault in faults}
        assert all(
            set(shape.names(kind)) - hit
            for kind in ("engine", "output-processor", "processor", "gateway")
        )
