"""Copies of KV blocks within host memory, made where they are asked for. On a CPU the cache is in host memory itself;
what reads or writes a copy beside the steps does not meet a step that writes to the block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..executor import SwapPlan, UInt8Array


class MemorySwapper:
    """See `Swapper`."""

    seconds_per_block = 0.0
    """A copy takes far less time than a block takes to compute."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], num_slots: int) -> None:
        """kv_caches [layers, 2, num_blocks, Hk, block_size, D] of each model whose keys and values a block has."""
        self._planes = [_as_planes(each) for each in kv_caches]
        self._sizes = [planes.shape[0] * planes.shape[2] for planes in self._planes]
        self.slots: UInt8Array = np.zeros((num_slots, sum(self._sizes)), np.uint8)
        self.num_saved = self.num_loaded = 0

    def swap(self, plan: SwapPlan) -> None:
        for block, slot in zip(plan.out_blocks.tolist(), plan.out_slots.tolist(), strict=True):
            for planes, part in zip(self._planes, self._parts(slot), strict=True):
                part.copy_(planes[:, block])
        for block, slot in zip(plan.in_blocks.tolist(), plan.in_slots.tolist(), strict=True):
            for planes, part in zip(self._planes, self._parts(slot), strict=True):
                planes[:, block].copy_(part)
        self.num_saved += plan.out_blocks.size
        self.num_loaded += plan.in_blocks.size

    def _parts(self, slot: int) -> list[torch.Tensor]:
        """A slot's bytes [planes, bytes of a plane] of each cache."""
        parts = torch.split(torch.from_numpy(self.slots[slot]), self._sizes)
        return [part.view(len(planes), -1) for part, planes in zip(parts, self._planes, strict=True)]


def _as_planes(kv_cache: torch.Tensor) -> torch.Tensor:
    """uint8 [layers · 2, num_blocks, bytes of a block in a plane], the same memory."""
    layers, two, num_blocks, *shape = kv_cache.shape
    planes = kv_cache.view(layers * two, num_blocks, -1)
    assert planes.is_contiguous(), shape
    return planes.view(torch.uint8)
