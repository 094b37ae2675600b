"""What the swapper of a GPU knows of copies on their way, and of the memory that it may have; no GPU is needed."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors import locked_slots
from headwater.engine_core.executors.cuda_swapper import _Pending, _runs
from headwater.engine_core.executors.locked_slots import OwnSlots, _container_limit, check_room


class Event:
    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class Stream:
    """As much of one as is used; records what it is told."""

    def __init__(self) -> None:
        self.recorded: deque[Event] = deque()
        self.awaited: list[Event] = []

    def record_event(self) -> Event:
        self.recorded.append(Event())
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        self.awaited.append(event)


def places(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_only_who_wants_one_of_its_places_waits_for_a_copy() -> None:
    pending = _Pending()
    copies: Any = Stream()
    steps: Any = Stream()
    for some in (places(1, 2), places(3), places(4, 1)):
        pending.note(copies, some)
    pending.let_wait(steps, places(9, 5))
    assert steps.awaited == []
    pending.let_wait(steps, places(9, 1))
    assert steps.awaited == [copies.recorded[0], copies.recorded[2]]
    copies.recorded[0].has_passed = True
    pending.let_wait(steps, places(2))
    assert len(steps.awaited) == 2


def test_copies_that_nobody_asks_about_leave_nothing() -> None:
    pending = _Pending()
    copies: Any = Stream()
    for i in range(100):
        pending.note(copies, places(i))
        copies.recorded[-1].has_passed = True
    assert len(pending._places) == 1


def test_neighbours_are_one_copy() -> None:
    assert [(at.start, at.stop, run.start, run.stop) for at, run in _runs(places(5, 6, 7, 2, 9, 10))] == [
        (0, 3, 5, 8),
        (3, 4, 2, 3),
        (4, 6, 9, 11),
    ]


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(locked_slots, "CONTAINER_LIMIT", file := tmp_path / "memory.max")
    return file


def test_more_than_a_container_may_have_is_refused_by_name(limit: Path) -> None:
    limit.write_text("4000\n")
    with pytest.raises(ConfigError, match="kv_swap_memory is 4096; allowed: at most 4000 bytes, the limit of this"):
        OwnSlots((2, 512))


def test_more_than_the_host_has_is_refused_by_name(limit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_slots, "_host_memory", lambda: 5000)
    check_room(5000)
    with pytest.raises(ConfigError, match="kv_swap_memory is 5001; allowed: at most 5000 bytes, the memory of this"):
        check_room(5001)


def test_without_a_limit_there_is_none(limit: Path) -> None:
    assert _container_limit() == math.inf
    limit.write_text("max\n")
    assert _container_limit() == math.inf
