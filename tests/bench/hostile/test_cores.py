"""Cores of deployments and of clients."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headwater.bench.hostile.cores import (
    SHORT_SLICE_NANOSECONDS,
    Cores,
    going_first,
    groups_of,
    running_on,
)
from tests.time_slice import slice_of_this_thread


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_small_machine_shares_its_cores(num: int) -> None:
    [cores] = groups_of(range(num))
    assert cores.deployment == cores.neighbour == cores.attacker == frozenset(range(num))
    assert cores.description == f"{num} shared cores"


def test_clients_of_a_larger_machine_take_no_core_of_a_deployment() -> None:
    assert groups_of(range(16, 27)) == [
        Cores(frozenset({16, 17}), frozenset({18}), frozenset({19})),
        Cores(frozenset({20, 21}), frozenset({22}), frozenset({23})),
    ]
    assert groups_of(range(4))[0].description == "2 own cores"


def test_what_is_started_runs_on_the_cores_of_the_scope() -> None:
    before = os.sched_getaffinity(0)
    script = "import os; print(*os.sched_getaffinity(0))"
    with running_on(frozenset({min(before)})):
        started = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert started.stdout.split() == [b"%d" % min(before)]
    assert os.sched_getaffinity(0) == before


def test_the_neighbours_client_goes_first_and_what_starts_later_does_not() -> None:
    before = slice_of_this_thread()
    if before == 0:
        pytest.skip("this kernel knows no slices of threads")
    with going_first():
        assert slice_of_this_thread() == SHORT_SLICE_NANOSECONDS
    assert slice_of_this_thread() == before
