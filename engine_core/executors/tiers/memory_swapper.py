"""Copies of KV blocks within host memory, made where they are asked for. On a CPU the cache is in
host memory itself; a block whose copy is read or written beside the steps is written by no step
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from ...executor import DirectCopies, SwapPlan, UInt8Array
from ..model.kv_blocks import KvBlocks
from .block_slice import BlockSlice

Piece = tuple[torch.Tensor, torch.Tensor]
"""A part of every block, uint8 [num_blocks, …], and where it lies in slots, [num_slots, …]."""


def _alone() -> None:
    """No other swapper is waited for."""


class MemorySwapper:
    """See `Swapper`."""

    seconds_per_block = 0.0
    """A copy takes far less time than a block takes to compute."""

    def __init__(
        self,
        loaded: Sequence[Piece],
        saved: Sequence[Piece],
        slots: UInt8Array,
        direct_copies: DirectCopies | None = None,
        meet: Callable[[], object] = _alone,
    ) -> None:
        """`loaded` and `saved`: pieces of blocks that are read from slots, and those that are
        written to them. `meet`: returns when the writers of the other pieces have made all
        requested copies; at once where this swapper writes every piece that it reads."""
        self._loaded = loaded
        self._saved = saved
        self.slots = slots
        self._meet = meet
        self.direct_copies = direct_copies
        self.num_saved = self.num_loaded = self._num_met = 0

    @classmethod
    def of(
        cls, memory: torch.Tensor, num_slots: int, direct_copies: DirectCopies | None = None
    ) -> Self:
        """A swapper with slots of its own. memory uint8 [num_blocks, bytes of a block]."""
        slots: UInt8Array = np.zeros((num_slots, memory.shape[1]), np.uint8)
        pieces = [(memory, torch.from_numpy(slots))]
        return cls(pieces, pieces, slots, direct_copies)

    @classmethod
    def of_part(
        cls,
        blocks: KvBlocks,
        slots: UInt8Array,
        part: BlockSlice,
        *,
        saves_drafts: bool,
        meet: Callable[[], object] = _alone,
    ) -> Self:
        """Swapper of one rank over slots that all ranks share; a slot holds a block as a single
        process would. A rank copies its part of the served model's heads. Draft layers are whole on
        every rank; the rank with `saves_drafts` saves them. `meet`: see `__init__`; all of these
        ranks meet at the same plans."""
        divided, *drafts = blocks.sizes
        num_whole = sum(drafts)
        rows = torch.from_numpy(slots)
        own, own_drafts = torch.split(blocks.memory, [divided, num_whole], dim=1)
        served, slot_drafts = torch.split(rows, [rows.shape[1] - num_whole, num_whole], dim=1)
        in_slots = part.of(served)
        pieces = [(own.view(len(own), *in_slots.shape[1:]), in_slots)]
        if not drafts:
            return cls(pieces, pieces, slots)
        loaded = [*pieces, (own_drafts, slot_drafts)]
        return cls(loaded, loaded if saves_drafts else pieces, slots, meet=meet)

    def swap(self, plan: SwapPlan) -> None:
        # The last save into a slot counts.
        fills = dict(zip(plan.out_slots.tolist(), plan.out_blocks.tolist(), strict=True))
        for slot, block in fills.items():
            for in_blocks, in_slots in self._saved:
                in_slots[slot] = in_blocks[block]
        self.num_saved += plan.out_blocks.size
        if plan.in_blocks.size:
            self._await_others()
        for block, slot in zip(plan.in_blocks.tolist(), plan.in_slots.tolist(), strict=True):
            for in_blocks, in_slots in self._loaded:
                in_blocks[block] = in_slots[slot]
        self.num_loaded += plan.in_blocks.size

    def _await_others(self) -> None:
        """Returns when the other ranks have saved as many blocks as this one. Ranks are not
        synchronized between plans otherwise: one could load a block that another one has not saved
        yet."""
        if self._num_met < self.num_saved:
            self._meet()
            self._num_met = self.num_saved
