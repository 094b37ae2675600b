"""Saves of blocks to host memory are counted as they end, so that nothing of them stays."""

from __future__ import annotations

import tracemalloc

import numpy as np

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.host_blocks import HostBlocks
from headwater.engine_core.kv.swapper_parts import SwapperParts
from tests.engine_core.test_host_blocks import RecordingSwapper, chain_of

NONE = np.empty(0, np.int32)
ONE_SAVE = SwapPlan(
    out_blocks=np.ones(1, np.int32), out_slots=np.zeros(1, np.int32), in_slots=NONE, in_blocks=NONE
)


class AskedSwapper(RecordingSwapper):
    """Counts how often the number of saves is read."""

    num_reads = 0

    @property
    def num_saved(self) -> int:
        self.num_reads += 1
        return 0

    @num_saved.setter
    def num_saved(self, number: int) -> None:
        assert number == 0


def test_ends_of_saves_are_counted_while_no_blocks_are_asked_for() -> None:
    swapper = AskedSwapper()
    host = HostBlocks(swapper, 8)
    hashes = chain_of(0, 2).hashes
    num_before = swapper.num_reads
    host.save(hashes, [1, 2], [b"", hashes[0]], Owner(b""))
    host.launch()
    assert swapper.num_reads == num_before + 1


def test_saves_that_nobody_counts_take_no_memory() -> None:
    swapper = RecordingSwapper()
    parts = SwapperParts(swapper)
    first = parts.part(4)
    second = parts.part(4)
    tracemalloc.start()
    try:
        for _ in range(5000):
            first.swap(ONE_SAVE)
            swapper.plans.clear()
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
    second.swap(ONE_SAVE)
    swapper.num_saved = 4000
    assert (first.num_saved, second.num_saved) == (4000, 0)
    swapper.num_saved = 5001
    assert (first.num_saved, second.num_saved) == (5000, 1)


def test_copies_of_an_earlier_engine_count_for_no_part() -> None:
    swapper = RecordingSwapper()
    swapper.num_saved = 7
    part = SwapperParts(swapper).part(4)
    part.swap(ONE_SAVE)
    assert part.num_saved == 0
    swapper.num_saved = 8
    assert part.num_saved == 1
