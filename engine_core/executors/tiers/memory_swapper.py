"""Copies of KV blocks within host memory, made where they are asked for. On a CPU the cache is in
host memory itself; what reads or writes a copy beside the steps does not meet a step that writes to
the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from ...executor import DirectCopies, SwapPlan, UInt8Array
from ..model.shared_kv import SharedCopies, SharedMemory
from .block_slice import BlockSlice


class MemorySwapper:
    """See `Swapper`."""

    seconds_per_block = 0.0
    """A copy takes far less time than a block takes to compute."""

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        slots: UInt8Array,
        direct_copies: DirectCopies | None = None,
        num_saved: int | None = None,
        meet: Callable[[], object] | None = None,
    ) -> None:
        """`planes`: uint8 [planes, num_blocks, bytes] of each cache; `parts`: uint8 [num_slots,
        planes, bytes] of each, which are views of `slots`. `num_saved`: caches, from the first on,
        that are written to slots; None: all. `meet`: returns when those that write other parts of
        the slots have made all copies that were asked for; None: every part that is read is written
        here."""
        self._loaded = list(zip(planes, parts, strict=True))
        self.slots = slots
        self._saved = self._loaded[:num_saved]
        self._meet = meet
        self.direct_copies = direct_copies
        self.num_saved = self.num_loaded = self._num_met = 0

    @classmethod
    def of(
        cls, kv_caches: Sequence[torch.Tensor], num_slots: int, memory: SharedMemory | None = None
    ) -> Self:
        """Over slots of its own. kv_caches [layers, 2, num_blocks, Hk, block_size, D] of each model
        whose keys and values a block has; `memory`: theirs, where other engines may copy from
        it."""
        planes = [_as_planes(each) for each in kv_caches]
        sizes = [each.shape[0] * each.shape[2] for each in planes]
        slots: UInt8Array = np.zeros((num_slots, sum(sizes)), np.uint8)
        own = torch.split(torch.from_numpy(slots), sizes, dim=1)
        parts = [
            part.view(num_slots, len(each), -1) for part, each in zip(own, planes, strict=True)
        ]
        copies = None
        if memory is not None:
            copies = SharedCopies(memory, [len(each) for each in planes], planes[0].shape[1])
        return cls(planes, parts, slots, copies)

    @classmethod
    def of_part(
        cls,
        kv_caches: Sequence[torch.Tensor],
        slots: UInt8Array,
        part: BlockSlice,
        *,
        saves_whole_planes: bool,
        meet: Callable[[], object] | None = None,
    ) -> Self:
        """Over slots that all ranks share, whose blocks are as those of one process. The first
        cache has this rank's part of its planes; the others are whole on every rank, one of which
        saves them. `meet`: see `__init__`; all of these ranks meet at the same plans."""
        divided, *others = (_as_planes(each) for each in kv_caches)
        sizes = [each.shape[0] * each.shape[2] for each in others]
        rows = torch.from_numpy(slots)
        first, *rest = torch.split(rows, [rows.shape[1] - sum(sizes), *sizes], dim=1)
        whole = [own.view(len(rows), len(each), -1) for own, each in zip(rest, others, strict=True)]
        num_saved = None if saves_whole_planes else 1
        meet = meet if others else None
        return cls([divided, *others], [part.of(first), *whole], slots, None, num_saved, meet)

    def swap(self, plan: SwapPlan) -> None:
        for block, slot in zip(plan.out_blocks.tolist(), plan.out_slots.tolist(), strict=True):
            for planes, parts in self._saved:
                parts[slot].copy_(planes[:, block])
        self.num_saved += plan.out_blocks.size
        if plan.in_blocks.size:
            self._await_others()
        for block, slot in zip(plan.in_blocks.tolist(), plan.in_slots.tolist(), strict=True):
            for planes, parts in self._loaded:
                planes[:, block].copy_(parts[slot])
        self.num_loaded += plan.in_blocks.size

    def _await_others(self) -> None:
        """Returns when the other ranks have saved what this one has. Nothing else keeps ranks
        together between two plans: one could load what another has yet to save."""
        if self._meet is not None and self._num_met < self.num_saved:
            self._meet()
            self._num_met = self.num_saved


def _as_planes(kv_cache: torch.Tensor) -> torch.Tensor:
    """uint8 [layers · 2, num_blocks, bytes of a block in a plane], the same memory."""
    layers, two, num_blocks, *shape = kv_cache.shape
    planes = kv_cache.view(layers * two, num_blocks, -1)
    assert planes.is_contiguous(), shape
    return planes.view(torch.uint8)
