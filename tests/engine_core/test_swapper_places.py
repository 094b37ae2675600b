"""How the swapper of a GPU divides copies, and the memory that it may have; no GPU is needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.tiers import locked_slots
from headwater.engine_core.executors.tiers.locked_slots import (
    ProcessSlots,
    _container_limit,
    check_room,
    runs,
)


def places(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_neighbours_in_both_places_are_one_copy() -> None:
    blocks = places(5, 6, 7, 2, 9, 10, 20)
    slots = places(1, 2, 3, 4, 5, 7, 8)
    assert [(own.start, own.stop, run.start, run.stop) for own, run in runs(blocks, slots)] == [
        (5, 8, 1, 4),
        (2, 3, 4, 5),
        (9, 10, 5, 6),
        (10, 11, 7, 8),
        (20, 21, 8, 9),
    ]


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(locked_slots, "CONTAINER_LIMIT", file := tmp_path / "memory.max")
    return file


def test_more_than_a_container_may_have_is_refused_by_name(limit: Path) -> None:
    limit.write_text("4000\n")
    with pytest.raises(
        ConfigError, match="kv_swap_memory is 4096; allowed: at most 4000 bytes, the limit of this"
    ):
        ProcessSlots((2, 512))


def test_more_than_the_host_has_is_refused_by_name(
    limit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_slots, "_host_memory", lambda: 5000)
    check_room(5000)
    with pytest.raises(
        ConfigError, match="kv_swap_memory is 5001; allowed: at most 5000 bytes, the memory of this"
    ):
        check_room(5001)


def test_without_a_limit_there_is_none(limit: Path) -> None:
    assert _container_limit() == math.inf
    limit.write_text("max\n")
    assert _container_limit() == math.inf
