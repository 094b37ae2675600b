"""Memory of adapters beside a model's weights: low-rank factors of every layer, rank by rank. Knows
no names of layers or adapters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

RANK_UNIT = 8
"""Ranks of an adapter are padded with zeros to a multiple of it; a slot begins at each of them."""
MAX_RANK = 256
PIECE = 1024
"""Inputs whose products are summed together; the sums of pieces are added in their order."""


@dataclass(frozen=True, slots=True)
class SlabLayer:
    """Place of one layer among the numbers of a rank: a row of A for each projection that is joined
    in the layer, [K] each, then a row of Bᵀ for all of them, [N]."""

    num_inputs: int
    parts: tuple[int, ...]
    """Outputs of each projection."""
    first: int
    """Numbers before it."""
    column: int
    """Index of the layer's first projection among the factors of an adapter."""

    @property
    def num_outputs(self) -> int:
        return sum(self.parts)

    @property
    def first_b(self) -> int:
        """Numbers before its Bᵀ."""
        return self.first + len(self.parts) * self.num_inputs

    @property
    def end(self) -> int:
        """Numbers up to its last one."""
        return self.first_b + self.num_outputs

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Outputs before each projection."""
        return tuple(accumulate(self.parts, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class Slab:
    """Adapters in device memory. An adapter of rank r has the slot s where its ranks begin at
    `RANK_UNIT` * s."""

    numbers: torch.Tensor
    """[ranks, numbers of a rank] in the model's dtype."""
    num_ranks: torch.Tensor
    """int32 [slots] padded rank of the adapter of each slot."""
    factors: torch.Tensor
    """float32 [slots, projections]; 0: the adapter has no such projection."""
