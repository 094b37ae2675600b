"""Where a rank's keys and values lie in a block of the whole model, so that the bytes of a block do
not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSlice:
    """A block is [planes, heads, elements of a head]: `ModelConfig.kv_planes` a layer, in each of
    them a stretch for every KV head."""

    num_planes: int
    planes: range
    num_heads: int
    heads: range

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """The slice in slots [num_slots, elements of a block]: a view [num_slots, planes of the
        slice, elements of its heads]."""
        whole = slots.view(len(slots), self.num_planes, self.num_heads, -1)
        own = whole[:, self.planes.start : self.planes.stop, self.heads.start : self.heads.stop]
        return own.flatten(2)
