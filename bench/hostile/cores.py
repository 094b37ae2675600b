"""Processor cores of a measurement. With four and more, clients take none from the deployment, and
groups of four measure side by side. With fewer, the neighbour's client goes before the deployment,
and the hostile one after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headwater.services.runtime.yielding_thread import ask_for_slices

GROUP = 4
SHORT_SLICE_NANOSECONDS = 100_000
"""The shortest time slice that Linux grants."""


@dataclass(frozen=True, slots=True)
class Cores:
    deployment: frozenset[int]
    neighbour: frozenset[int]
    attacker: frozenset[int]

    @property
    def description(self) -> str:
        if self.attacker & self.deployment:
            return f"{len(self.deployment)} shared cores"
        return f"{len(self.deployment)} own cores"


def groups_of(cores: Sequence[int]) -> list[Cores]:
    """Groups of four: two cores of a deployment, one of each client. One group that shares all
    cores, where there are fewer."""
    if len(cores) < GROUP:
        shared = frozenset(cores)
        return [Cores(shared, shared, shared)]
    return [
        Cores(
            frozenset(cores[i : i + 2]), frozenset(cores[i + 2 : i + 3]), frozenset((cores[i + 3],))
        )
        for i in range(0, len(cores) - GROUP + 1, GROUP)
    ]


@contextlib.contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """Scope in which this thread, and what it starts, runs on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def going_first() -> Iterator[None]:
    """Scope in which this thread takes a processor at once when it wakes up, as a client on a
    machine of its own does: of a first token's 158 ms, 118 were the client's own wait for a
    processor (2026-11-30)."""
    ask_for_slices(SHORT_SLICE_NANOSECONDS)
    try:
        yield
    finally:
        ask_for_slices(0)
