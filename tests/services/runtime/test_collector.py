from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from headwater.services.runtime import collector


@pytest.fixture
def _collector_as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    """Something that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("_collector_as_before")
def test_what_exists_is_left_out_of_collections_and_what_comes_later_is_not() -> None:
    kept = [Cycle() for _ in range(100)]
    collector.leave_out_what_exists()
    del kept
    assert gc.collect() < 100
    gc.freeze()
    later = [Cycle() for _ in range(100)]
    del later
    assert gc.collect() >= 100


@pytest.mark.usefixtures("_collector_as_before")
def test_cycles_are_collected_before_they_are_many() -> None:
    collector.leave_out_what_exists()
    most = 0
    for _ in range(5 * collector.YOUNG_OBJECTS):
        Cycle()
        most = max(most, gc.get_count()[0])
    # Rarer than by Python's 700, and not without end.
    assert collector.YOUNG_OBJECTS / 2 < most <= collector.YOUNG_OBJECTS + 1
    assert sum(isinstance(each, Cycle) for each in gc.get_objects()) <= collector.YOUNG_OBJECTS


@pytest.mark.usefixtures("_collector_as_before")
def test_cycles_that_outlive_collections_are_found_by_later_ones() -> None:
    collector.leave_out_what_exists()
    lasting = [Cycle() for _ in range(100)]
    collected = dict.fromkeys(range(3), 0)

    def count(phase: str, info: dict[str, int]) -> None:
        collected[info["generation"]] += phase == "stop"

    gc.callbacks.append(count)
    try:
        for _ in range(3 * collector.YOUNG_OBJECTS):
            Cycle()
        assert sum(collected.values()) >= 2
        weak = weakref.ref(lasting[0])
        del lasting
        made = 0
        while weak() is not None and made < 3 * collector.OLDER * collector.YOUNG_OBJECTS:
            Cycle()
            made += 1
    finally:
        gc.callbacks.remove(count)
    assert weak() is None
    assert collected[0] > collector.OLDER / 2 >= collected[1] > 0
