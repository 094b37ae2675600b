"""Slots that ranks share: the parts of all ranks make the block of one process. No GPU is needed:
copies are made by hand."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import UInt8Array
from headwater.engine_core.executors.tiers.block_slice import BlockSlice
from headwater.engine_core.executors.tiers.locked_slots import PAGE_BYTES, RankSlots, touch
from headwater.kernels.blocks import copy_rows
from tests.engine_core.test_locked_memory import Runtime, runtime
from tests.kernels.row_driver import copied_by_hand

__all__ = ["runtime"]
NUM_SLOTS = 5
NUM_PLANES = 8
NUM_HEADS = 6
HEAD_WORDS = 32
HEADS = [range(2), range(2, 4), range(4, 6)]
LAYOUTS = {
    "all layers": ([range(8)], HEADS, 1),
    "all heads": ([range(2), range(2, 8)], [range(6)], 1),
    "neither": ([range(2), range(2, 8)], HEADS, 3),
}
"""Planes and heads of the ranks, and commands for a run of three slots."""


@pytest.fixture(autouse=True)
def heights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each copy."""
    noted = list[int]()

    def launch(copy: copy_rows._Copy, stream: int) -> int:
        noted.append(copy.height)
        return copied_by_hand(copy, stream)

    monkeypatch.setattr(copy_rows, "_launch", launch)
    monkeypatch.setattr(copy_rows, "_stream", lambda: 0)
    return noted


def mapped_slots() -> UInt8Array:
    shape = NUM_SLOTS, 4 * NUM_PLANES * NUM_HEADS * HEAD_WORDS
    return np.frombuffer(mmap.mmap(-1, shape[0] * shape[1]), np.uint8).reshape(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_ranks_make_whole_blocks_and_come_back(
    runtime: Runtime, layout: str, heights: list[int]
) -> None:
    stages, parts, num_commands = LAYOUTS[layout]
    blocks = torch.arange(3 * NUM_PLANES * NUM_HEADS * HEAD_WORDS, dtype=torch.int32).view(
        3, NUM_PLANES, NUM_HEADS, -1
    )
    slots = mapped_slots()
    for planes in stages:
        for heads in parts:
            part = BlockSlice(
                num_planes=NUM_PLANES, planes=planes, num_heads=NUM_HEADS, heads=heads
            )
            rank = RankSlots(slots, part)
            own = blocks[:, planes.start : planes.stop, heads.start : heads.stop].reshape(3, -1)
            places = np.arange(3, dtype=np.int32), np.arange(1, 4, dtype=np.int32)
            rank.copy_out(own, *places)
            back = torch.zeros_like(own)
            rank.copy_in(back, *places)
            assert torch.equal(back, own)
            rank.release()
    assert (slots[1:4].view(np.int32) == blocks.view(3, -1).numpy()).all()
    assert not slots[[0, 4]].any()
    assert not runtime.locked
    assert len(heights) == 2 * num_commands * len(stages) * len(parts)


def test_a_rank_locks_the_whole_mapping(runtime: Runtime) -> None:
    slots = mapped_slots()
    part = BlockSlice(num_planes=NUM_PLANES, planes=range(8), num_heads=NUM_HEADS, heads=HEADS[1])
    rank = RankSlots(slots, part)
    assert runtime.locked == {slots.ctypes.data: slots.nbytes}
    rank.release()


def test_ranks_touch_every_page_once_between_them() -> None:
    memory = torch.ones(10 * PAGE_BYTES // 4 + 3, dtype=torch.int32)
    for index in range(3):
        before = int((memory == 0).sum())
        touch(memory, index, 3)
        assert int((memory == 0).sum()) - before in (3, 4)
    assert torch.nonzero(memory == 0).flatten().tolist() == list(
        range(0, len(memory), PAGE_BYTES // 4)
    )
