"""Copies whole KV blocks on a GPU, within its memory or from the memory of another process on this
GPU or a reachable one. Does not open that memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
PULL_PROGRAMS = 96
"""Programs of a launch that pulls: as many as saturate the links between GPUs. They take tiles in
turn, so that a copy of gigabytes leaves multiprocessors to the steps beside it."""


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Copies block source_blocks[i] to target_blocks[i], int32 [N] each. source, target int32
    [num_blocks, words], contiguous, of as many words."""
    assert source.is_contiguous()
    assert source.shape[1] == target.shape[1]
    num_tiles = len(source_blocks) * triton.cdiv(target.shape[1], BLOCK)
    pull_blocks(source.data_ptr(), target, source_blocks, target_blocks, max(num_tiles, 1))


def pull_blocks(
    address: int,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    num_programs: int = PULL_PROGRAMS,
) -> None:
    """Like `copy_blocks`, from an address: that of int32 [num_blocks, words], contiguous."""
    assert target.is_contiguous()
    num_words = target.shape[1]
    num_tiles = len(source_blocks) * triton.cdiv(num_words, BLOCK)
    if num_tiles:
        grid = (min(num_tiles, num_programs),)
        blocks = source_blocks, target_blocks
        _copy[grid](address, target, *blocks, num_words, num_tiles, BLOCK=BLOCK, num_warps=8)


def copy_blocks_twin(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    target[target_blocks.long()] = source[source_blocks.long()]


# One kernel for any number of blocks, which also decides how the lists of blocks are aligned, and
# which may be parts of longer ones: a compilation would hold up the engine's steps.
@triton.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["p_source_block", "p_target_block"],
)
def _copy(
    address,
    p_target,
    p_source_block,
    p_target_block,
    num_words,
    num_tiles,
    BLOCK: tl.constexpr,
):
    p_source = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    tiles_of_block = tl.cdiv(num_words, BLOCK)
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        o_w = (i_tile % tiles_of_block) * BLOCK + tl.arange(0, BLOCK)
        i_pair = i_tile // tiles_of_block
        i_source = tl.load(p_source_block + i_pair).to(tl.int64)
        i_target = tl.load(p_target_block + i_pair).to(tl.int64)
        inside = o_w < num_words
        # The number of words of a block is a multiple of four, so they are loaded four at a time.
        b_words = tl.load(p_source + i_source * num_words + o_w, mask=inside)
        tl.store(p_target + i_target * num_words + o_w, b_words, mask=inside)
