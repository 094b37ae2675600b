"""Moves whole KV blocks: within the cache, and between the cache and a staging buffer that crosses to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def copy_blocks(kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """kv_cache [layers, 2, num_blocks, Hk, block_size, D]; int32 [N] block ids, targets disjoint from sources.

    A pair whose target is negative is skipped, so that a graph may hold a fixed N.
    """
    planes, block_words = _planes(kv_cache)
    _move(planes, planes, sources, targets, block_words)


def gather_blocks(kv_cache: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
    """Blocks int32 [N] into staging [layers, 2, at least N, Hk, block_size, D], densely, for one copy to the host."""
    planes, block_words = _planes(kv_cache)
    positions = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
    _move(planes, _planes(staging)[0], blocks, positions, block_words)


def scatter_blocks(staging: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """The reverse of `gather_blocks`."""
    planes, block_words = _planes(kv_cache)
    positions = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
    _move(_planes(staging)[0], planes, positions, blocks, block_words)


def copy_blocks_twin(kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    kept = targets >= 0
    kv_cache[:, :, targets[kept].long()] = kv_cache[:, :, sources[kept].long()]


def _planes(kv_cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The cache as [layers x 2, num_blocks, words of 4 bytes], whatever its dtype."""
    planes = kv_cache.flatten(0, 1).flatten(2).view(torch.int32)
    assert planes.stride(2) == 1
    assert planes.stride(1) == planes.shape[2]
    return planes, planes.shape[2]


def _move(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor, block_words: int
) -> None:
    if len(source_ids) == 0:
        return
    grid = (len(source_ids), source.shape[0], triton.cdiv(block_words, BLOCK))
    _move_blocks[grid](
        source, target, source_ids, target_ids, source.stride(0), target.stride(0), block_words, BLOCK=BLOCK
    )


@triton.jit
def _move_blocks(
    p_source, p_target, p_source_id, p_target_id, stride_source, stride_target, block_words, BLOCK: tl.constexpr
):
    i_pair, i_plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(p_source_id + i_pair).to(tl.int64)
    target = tl.load(p_target_id + i_pair).to(tl.int64)
    inside = (o_w < block_words) & (target >= 0)
    b_words = tl.load(p_source + i_plane * stride_source + source * block_words + o_w, mask=inside)
    tl.store(p_target + i_plane * stride_target + target * block_words + o_w, b_words, mask=inside)
