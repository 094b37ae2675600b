"""Keys and values of what drafts, which every rank has and one saves: no rank loads them before
they are saved."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import Int32Array, SwapPlan
from headwater.engine_core.executors.tiers.block_slice import BlockSlice
from headwater.engine_core.executors.tiers.memory_swapper import MemorySwapper
from headwater.engine_core.parallel.memory_group import MemoryGroup, create_group
from headwater.engine_core.parallel.rank_waits import RankWaits
from tests.engine_core.made_blocks import blocks_of

NUM_RANKS = 2
NUM_SLOTS = 4
NONE: Int32Array = np.empty(0, np.int32)


class Rank:
    """A rank of two, with its heads of a model and all of a draft model; a swapper over slots that
    both map."""

    def __init__(
        self, group: MemoryGroup, slots: np.ndarray, whole: torch.Tensor, draft: torch.Tensor
    ) -> None:
        heads = range(3 * group.index, 3 * group.index + 3)
        blocks = blocks_of(whole[:, :, :, heads.start : heads.stop], draft)
        self.kv_caches = blocks.kv_caches
        self.may_save = threading.Event()
        self.swapper = MemorySwapper.of_part(
            blocks,
            slots,
            BlockSlice(num_planes=4, planes=range(4), num_heads=6, heads=heads),
            saves_drafts=group.index == 0,
            meet=lambda: group.join(torch.zeros(1, 1)),
        )

    def swap(self, *, out: int | None = None, back: int | None = None) -> None:
        """Copies block `out` to slot 2, or slot 2 to block `back`."""
        slot = np.array([2], np.int32)
        if out is not None:
            self.may_save.wait()
            self.swapper.swap(SwapPlan(out_blocks=np.array([out], np.int32), out_slots=slot))
        if back is not None:
            self.swapper.swap(SwapPlan(in_slots=slot, in_blocks=np.array([back], np.int32)))


@pytest.mark.parametrize("late", range(NUM_RANKS))
def test_a_rank_loads_what_another_one_saves_however_late_that_one_is(late: int) -> None:
    whole = torch.randn(2, 2, 9, 6, 4, 8)
    draft = torch.randn(1, 2, 9, 2, 4, 8)
    alone = MemorySwapper.of(blocks_of(whole, draft).memory, NUM_SLOTS)
    slots = np.zeros_like(alone.slots)
    waits = threading.Event()

    def send(is_waiting: bool) -> None:
        if is_waiting:
            waits.set()

    ends = create_group(NUM_RANKS)
    groups = [
        MemoryGroup(i, end, RankWaits(send) if i != late else None) for i, end in enumerate(ends)
    ]
    ranks = [Rank(group, slots, whole, draft) for group in groups]

    def work(rank: Rank) -> None:
        for _ in range(2):
            rank.swap(out=5)
            rank.swap(back=7)
            # Nothing was saved since: no rank waits for another.
            rank.swap(back=3)
        waits.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
    ranks[1 - late].may_save.set()
    for thread in threads:
        thread.start()
    # The prompt rank waits for the late one, or would have loaded before that one saved.
    waits.wait()
    ranks[late].may_save.set()
    for thread in threads:
        thread.join()
    for rank in ranks:
        for cache in rank.kv_caches:
            assert torch.equal(cache[:, :, 7], cache[:, :, 5])
            assert torch.equal(cache[:, :, 3], cache[:, :, 5])
    for group in groups:
        group.close()
