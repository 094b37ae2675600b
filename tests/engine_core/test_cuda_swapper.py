from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import count

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import Int32Array, SwapPlan
from headwater.engine_core.executors.model.kv_blocks import KvBlocks
from headwater.engine_core.executors.tiers import cuda_swapper
from headwater.engine_core.executors.tiers.block_slice import BlockSlice
from headwater.engine_core.executors.tiers.cuda_swapper import CudaSwapper
from headwater.engine_core.executors.tiers.locked_slots import RankSlots
from headwater.engine_core.executors.tiers.save_queue import MOST_ON_WAY
from headwater.engine_core.system.ring import anonymous_memory
from tests.engine_core.made_blocks import blocks_of
from tests.polling import holds_within

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 40
NUM_SLOTS = 64
NONE = np.empty(0, np.int32)


@pytest.fixture
def blocks() -> KvBlocks:
    torch.manual_seed(0)
    return blocks_of(torch.randn(3, 2, NUM_BLOCKS, 2, 16, 64, device="cuda").bfloat16())


@pytest.fixture
def cache(blocks: KvBlocks) -> torch.Tensor:
    return blocks.kv_caches[0]


@pytest.fixture(params=[1, 3, 1000], ids=lambda n: f"{n} at once")
def swapper(
    request: pytest.FixtureRequest, blocks: KvBlocks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaSwapper]:
    monkeypatch.setattr(cuda_swapper, "PART_BYTES", request.param * blocks.memory[0].nbytes)
    with closing(CudaSwapper(blocks, NUM_SLOTS)) as made:
        assert made.blocks_of_part == request.param
        # Memory that stays locked when it is freed fails copies of later tests.
        yield made
        torch.cuda.synchronize()


DELAY_CYCLES = 400_000_000
"""A fifth of a second."""


def test_copies_wait_for_what_filled_the_blocks_before_the_swapper_was_made(
    blocks: KvBlocks, cache: torch.Tensor
) -> None:
    """They run on streams of their own."""
    before = cache.clone()
    cache.zero_()
    torch.cuda._sleep(DELAY_CYCLES)
    cache.copy_(before)
    swapper = CudaSwapper(blocks, NUM_SLOTS)
    swapper.swap(out([4, 9, 2, 30, 7], [10, 11, 12, 3, 50]))
    assert holds_within(lambda: swapper.num_saved == 5, 10.0)
    cache.zero_()
    torch.cuda.synchronize()
    swapper.swap(back([50, 10, 11, 12, 3], [1, 20, 21, 22, 5]))
    wait(swapper, 5)
    assert torch.equal(cache[:, :, [1, 20, 21, 22, 5]], before[:, :, [7, 4, 9, 2, 30]])
    swapper.close()


def out(blocks: list[int], slots: list[int]) -> SwapPlan:
    return SwapPlan(out_blocks=words(blocks), out_slots=words(slots), in_slots=NONE, in_blocks=NONE)


def back(slots: list[int], blocks: list[int]) -> SwapPlan:
    return SwapPlan(out_blocks=NONE, out_slots=NONE, in_slots=words(slots), in_blocks=words(blocks))


def words(values: list[int]) -> Int32Array:
    return np.array(values, np.int32)


def wait(swapper: CudaSwapper, num_loaded: int) -> None:
    for attempt in count():
        if swapper.num_loaded == num_loaded:
            return
        assert attempt < 1_000_000, "blocks do not come"


def test_a_block_has_keys_and_values_of_several_caches(cache: torch.Tensor) -> None:
    blocks = blocks_of(cache, torch.randn(2, 2, NUM_BLOCKS, 3, 16, 32, device="cuda"))
    cache, other = blocks.kv_caches
    before = cache.clone(), other.clone()
    swapper = CudaSwapper(blocks, NUM_SLOTS)
    swapper.swap(out([4, 9, 2], [10, 11, 3]))
    assert holds_within(lambda: swapper.num_saved == 3, 10.0)
    cache.zero_()
    other.zero_()
    torch.cuda.synchronize()
    swapper.swap(back([3, 10, 11], [1, 20, 21]))
    wait(swapper, 3)
    for after, expected in zip((cache, other), before, strict=True):
        assert torch.equal(after[:, :, [1, 20, 21]], expected[:, :, [2, 4, 9]])
        assert not after[:, :, 2:20].any()
    swapper.close()


def test_blocks_come_back_from_slots_in_any_order_as_they_left(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    before = cache.clone()
    swapper.swap(out([4, 9, 2, 30, 7], [10, 11, 12, 3, 50]))
    assert holds_within(lambda: swapper.num_saved == 5, 10.0)
    cache.zero_()
    torch.cuda.synchronize()
    swapper.swap(back([50, 10, 11, 12, 3], [1, 20, 21, 22, 5]))
    wait(swapper, 5)
    assert torch.equal(cache[:, :, [1, 20, 21, 22, 5]], before[:, :, [7, 4, 9, 2, 30]])
    assert not cache[:, :, [0, 2, 3, 4, 6]].any()


def test_the_last_save_into_a_slot_counts(cache: torch.Tensor, swapper: CudaSwapper) -> None:
    before = cache.clone()
    swapper.swap(out([4, 9, 2, 7], [10, 11, 10, 11]))
    swapper.swap(back([10, 11], [20, 21]))
    wait(swapper, 2)
    assert holds_within(lambda: swapper.num_saved == 4, 10.0)
    assert torch.equal(cache[:, :, [20, 21]], before[:, :, [2, 7]])


def test_writes_to_a_block_being_saved_and_reads_of_a_slot_being_filled_wait(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    before = cache.clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    leaving = list(range(1, NUM_BLOCKS))
    slots = leaving[::-1]
    for turn in range(1, 6):
        swapper.swap(out(leaving, slots))
        with torch.cuda.stream(stream):
            swapper.protect(stream, words([1, 2, 3]))
            swapper.protect(stream, words(leaving))
            cache.zero_()
        stream.synchronize()
        # Slots may still be on their way to the host.
        swapper.swap(back(slots, leaving))
        wait(swapper, turn * len(leaving))
        assert torch.equal(cache[:, :, 1:], before[:, :, 1:])


def test_blocks_and_slots_of_copies_that_are_held_are_safe(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    before = cache.clone()
    stream = torch.cuda.Stream()
    leaving = list(range(1, NUM_BLOCKS))
    torch.cuda.synchronize()
    with torch.cuda.stream(swapper._out):
        torch.cuda._sleep(DELAY_CYCLES)
    swapper.swap(out(leaving, leaving))
    with torch.cuda.stream(stream):
        swapper.protect(stream, words(leaving[10:20]))
        cache[:, :, 11:21] = 0
    stream.synchronize()
    swapper.swap(back(leaving[20:30], leaving[10:20]))
    wait(swapper, 10)
    assert torch.equal(cache[:, :, 11:21], before[:, :, 21:31])
    assert holds_within(lambda: swapper.num_saved == len(leaving), 10.0)
    cache.zero_()
    torch.cuda.synchronize()
    swapper.swap(back(leaving, leaving))
    wait(swapper, 10 + len(leaving))
    assert torch.equal(cache[:, :, 1:], before[:, :, 1:])


def test_a_swapper_may_be_closed_while_copies_out_are_held(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    with torch.cuda.stream(swapper._out):
        torch.cuda._sleep(DELAY_CYCLES)
    swapper.swap(out(list(range(1, NUM_BLOCKS)), list(range(1, NUM_BLOCKS))))
    swapper._saves.close()
    slots = swapper.slots.copy()
    torch.cuda.synchronize()
    assert np.array_equal(swapper.slots, slots)
    assert swapper.num_saved <= MOST_ON_WAY * swapper.blocks_of_part


def test_a_block_that_is_leaving_may_be_filled_by_the_same_plan(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    before = cache.clone()
    torch.cuda.synchronize()
    both = out(list(range(1, 20)), list(range(19)))
    swapper.swap(
        SwapPlan(
            out_blocks=both.out_blocks,
            out_slots=both.out_slots,
            in_slots=words(list(range(18, -1, -1))),
            in_blocks=both.out_blocks,
        )
    )
    wait(swapper, 19)
    assert torch.equal(cache[:, :, 1:20], before[:, :, list(range(19, 0, -1))])


def test_the_time_of_a_block_is_that_of_the_bus(cache: torch.Tensor, swapper: CudaSwapper) -> None:
    """A block of 24 kB takes longer than memory on the GPU would, and less than a disk."""
    assert swapper.seconds_per_block == 0.0
    swapper.measure()
    assert cache[:, :, 0].nbytes / 4e12 < swapper.seconds_per_block < cache[:, :, 0].nbytes / 1e7
    swapper.swap(out([4], [10]))
    swapper.swap(back([10], [5]))
    wait(swapper, 1)
    assert torch.equal(cache[:, :, 5], cache[:, :, 4])


def test_a_slot_can_be_read_once_its_block_has_left(
    cache: torch.Tensor, swapper: CudaSwapper
) -> None:
    before = cache.clone()
    swapper.swap(out([4, 9], [10, 11]))
    assert holds_within(lambda: swapper.num_saved == 2, 10.0)
    taken = swapper.slots[10].copy()
    cache.zero_()
    # Loads wait for no step: their blocks belong to none that is on its way.
    torch.cuda.synchronize()
    swapper.slots[20] = taken
    swapper.swap(back([20], [1]))
    wait(swapper, 1)
    assert torch.equal(cache[:, :, 1], before[:, :, 4])


@pytest.mark.parametrize(
    "stages", [[range(6)], [range(2), range(2, 6)]], ids=["all layers", "stages"]
)
@pytest.mark.parametrize("num_together", [3, 1000])
def test_the_parts_of_ranks_make_the_block_of_one_process(
    blocks: KvBlocks, stages: list[range], num_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share the slots. In this process each has a mapping of its own, as in one of its
    own."""
    monkeypatch.setattr(cuda_swapper, "PART_BYTES", num_together * blocks.memory[0].nbytes)
    (cache,) = blocks.kv_caches
    out_plan = out([4, 9, 2, 30, 7], [10, 11, 12, 3, 50])
    in_plan = back([50, 10, 11, 12, 3], [1, 20, 21, 22, 5])
    with closing(CudaSwapper(blocks, NUM_SLOTS)) as alone, ExitStack() as ranks:
        alone.swap(out_plan)
        assert holds_within(lambda: alone.num_saved == 5, 10.0)
        memory = anonymous_memory("slots", alone.slots.nbytes)
        ranks.callback(os.close, memory)
        for planes in stages:
            for heads in (range(1), range(1, 2)):
                slots = np.frombuffer(mmap.mmap(memory, alone.slots.nbytes), np.uint8).reshape(
                    alone.slots.shape
                )
                part = BlockSlice(num_planes=6, planes=planes, num_heads=2, heads=heads)
                layers = slice(planes.start // 2, planes.stop // 2)
                own_blocks = blocks_of(cache[layers, :, :, heads.start : heads.stop])
                (own,) = own_blocks.kv_caches
                before = own.clone()
                rank = ranks.enter_context(
                    closing(CudaSwapper(own_blocks, NUM_SLOTS, RankSlots(slots, part)))
                )
                rank.measure()
                # It copied slots of zeros to the first blocks.
                own.copy_(before)
                torch.cuda.synchronize()
                assert rank.seconds_per_block > 0
                rank.swap(out_plan)
                assert holds_within(lambda rank=rank: rank.num_saved == 5, 10.0)
                own.zero_()
                torch.cuda.synchronize()
                rank.swap(in_plan)
                wait(rank, 5)
                assert torch.equal(own[:, :, [1, 20, 21, 22, 5]], before[:, :, [7, 4, 9, 2, 30]])
                assert not own[:, :, [0, 2, 3, 4, 6]].any()
        assert (slots == alone.slots).all()
