"""Copies whole KV blocks on the GPU, between the cache and a buffer that crosses to host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def as_planes(kv_cache: torch.Tensor) -> torch.Tensor:
    """View of a cache [layers, 2, num_blocks, Hk, block_size, D] of any dtype as int32 [layers x 2,
    num_blocks, words]."""
    return kv_cache.flatten(0, 1).flatten(2).view(torch.int32)


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Copies block source_blocks[i] of every plane to target_blocks[i], int32 [N] each.

    source, target int32 [planes, blocks, words] of any strides but for words, which lie together.
    """
    assert source.stride(2) == target.stride(2) == 1
    num_words = source.shape[2]
    grid = (len(source_blocks), source.shape[0], triton.cdiv(num_words, BLOCK))
    if grid[0]:
        strides = *source.stride()[:2], *target.stride()[:2]
        _copy[grid](source, target, source_blocks, target_blocks, *strides, num_words, BLOCK=BLOCK)


def copy_blocks_twin(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    target[:, target_blocks.long()] = source[:, source_blocks.long()]


# One kernel however the lists of blocks are aligned, which may be parts of longer ones: a
# compilation would hold up the engine's steps.
@triton.jit(do_not_specialize_on_alignment=["p_source_block", "p_target_block"])
def _copy(
    p_source,
    p_target,
    p_source_block,
    p_target_block,
    source_plane,
    source_block,
    target_plane,
    target_block,
    num_words,
    BLOCK: tl.constexpr,
):
    i_pair = tl.program_id(0)
    i_plane = tl.program_id(1).to(tl.int64)
    o_w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i_source = tl.load(p_source_block + i_pair).to(tl.int64)
    i_target = tl.load(p_target_block + i_pair).to(tl.int64)
    inside = o_w < num_words
    b_words = tl.load(
        p_source + i_plane * source_plane + i_source * source_block + o_w, mask=inside
    )
    tl.store(
        p_target + i_plane * target_plane + i_target * target_block + o_w, b_words, mask=inside
    )
