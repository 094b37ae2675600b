"""KV blocks that hold given keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout


def layout_of(cache: torch.Tensor) -> KvLayout:
    """Layout of a cache [layers, 2, num_blocks, Hk, block_size, D]."""
    num_layers, _, _, num_kv_heads, _, head_dim = cache.shape
    return KvLayout(num_layers, num_kv_heads, head_dim, cache.dtype)


def filled(blocks: KvBlocks, caches: Sequence[torch.Tensor]) -> KvBlocks:
    """The blocks, with the keys and values of caches of their layouts."""
    for own, cache in zip(blocks.kv_caches, caches, strict=True):
        own.copy_(cache)
    return blocks


def blocks_of(*caches: torch.Tensor) -> KvBlocks:
    """Blocks of their own memory with the keys and values of caches [layers, 2, num_blocks, Hk,
    block_size, D]."""
    layouts = [layout_of(each) for each in caches]
    num_blocks, block_size = caches[0].shape[2], caches[0].shape[4]
    made = KvBlocks.allocated(layouts, num_blocks, block_size, caches[0].device)
    return filled(made, caches)
