"""Copies whole KV blocks out of the memory of another process, on this GPU or on one that it
reaches, and what opens that memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
NUM_PROGRAMS = 96
"""Programs of a launch. They take their tiles by turns, so that a copy of gigabytes leaves
multiprocessors to the steps beside it; as many as fill the links between GPUs."""


def pull_blocks(
    address: int,
    num_blocks: int,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Copies block source_blocks[i] of every plane at an address to target_blocks[i], int32 [N]
    each.

    address: of int32 [planes, num_blocks, words], contiguous; target int32 [planes, blocks, words]
    of any strides but for words, which lie together.
    """
    assert target.stride(2) == 1
    num_planes, _, num_words = target.shape
    num_tiles = len(source_blocks) * num_planes * triton.cdiv(num_words, BLOCK)
    if num_tiles:
        sizes = num_blocks, *target.stride()[:2], num_words, num_planes, num_tiles
        grid = (min(num_tiles, num_programs),)
        _pull[grid](address, target, source_blocks, target_blocks, *sizes, BLOCK=BLOCK, num_warps=8)


# One kernel for any cache of another engine and any number of blocks, which also decides how the
# second list of blocks is aligned: a compilation would hold up the engine's steps.
@triton.jit(
    do_not_specialize=["num_blocks", "num_tiles"],
    do_not_specialize_on_alignment=["p_source_block", "p_target_block"],
)
def _pull(
    address,
    p_target,
    p_source_block,
    p_target_block,
    num_blocks,
    target_plane,
    target_block,
    num_words,
    num_planes,
    num_tiles,
    BLOCK: tl.constexpr,
):
    p_source = tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int32)), 16)
    tiles_of_block = tl.cdiv(num_words, BLOCK)
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        o_w = (i_tile % tiles_of_block) * BLOCK + tl.arange(0, BLOCK)
        i_plane = (i_tile // tiles_of_block % num_planes).to(tl.int64)
        i_pair = i_tile // tiles_of_block // num_planes
        i_source = tl.load(p_source_block + i_pair).to(tl.int64)
        i_target = tl.load(p_target_block + i_pair).to(tl.int64)
        inside = o_w < num_words
        # A multiple of the words of a block, of which it is known that they are loaded four at a
        # time.
        b_words = tl.load(
            p_source + (i_plane * num_blocks + i_source) * num_words + o_w, mask=inside
        )
        tl.store(
            p_target + i_plane * target_plane + i_target * target_block + o_w, b_words, mask=inside
        )
