"""The process that attacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.bench.hostile.attacker import attacker
from headwater.bench.hostile.bodies import CONTROLS, named
from headwater.services.runtime.yielding_thread import LOWERED, LOWERED_SLICE_NANOSECONDS
from tests.time_slice import slice_of_this_thread

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.long
def test_it_yields_to_the_servers_within_its_session_and_as_a_session() -> None:
    with attacker(frozenset(os.sched_getaffinity(0))) as process:
        assert process.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == LOWERED
        assert process.submit(os.getsid, 0).result() != os.getsid(0)
        if AUTOGROUP.exists():
            session = process.submit(AUTOGROUP.read_text).result()
            assert session.endswith(f" nice {LOWERED}\n")
        assert process.submit(slice_of_this_thread).result() in (0, LOWERED_SLICE_NANOSECONDS)


def test_controls_are_found_by_name_as_bodies_are() -> None:
    assert [named(body.name) for body in CONTROLS] == list(CONTROLS)
    assert named("keys").name == "keys"
