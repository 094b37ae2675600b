"""Memory of adapters beside a model's weights: low-rank factors layer by layer, and of a layer rank
by rank. Knows no names of layers or adapters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

RANK_UNIT = 8
"""Ranks of an adapter are padded with zeros to a multiple of it; a slot begins at each of them."""
MAX_RANK = 256
ALIGNMENT = 16
"""Numbers: kernels read the factors of every rank by whole lines."""
PIECE = 1024
"""Inputs whose products are summed together; the sums of pieces are added in their order."""


@dataclass(frozen=True, slots=True)
class SlabLayer:
    """Numbers that a rank has for one layer: a row of A for each projection that is joined in the
    layer, [K] each, then a row of Bᵀ for all of them, [N]."""

    num_inputs: int
    parts: tuple[int, ...]
    """Outputs of each projection."""
    first: int
    """Numbers that a rank has for the layers before it."""
    column: int
    """Index of the layer's first projection among the factors of an adapter."""

    @property
    def num_outputs(self) -> int:
        return sum(self.parts)

    @property
    def first_b(self) -> int:
        """Numbers before its Bᵀ."""
        return len(self.parts) * self.num_inputs

    @property
    def size(self) -> int:
        """Numbers of a rank, padded."""
        return -(-(self.first_b + self.num_outputs) // ALIGNMENT) * ALIGNMENT

    @property
    def end(self) -> int:
        """Numbers that a rank has for the layers up to this one."""
        return self.first + self.size

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Outputs before each projection."""
        return tuple(accumulate(self.parts, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class Slab:
    """Adapters in device memory. An adapter of rank r has the slot s where its ranks begin at
    `RANK_UNIT` * s."""

    numbers: torch.Tensor
    """[ranks * numbers of a rank] in the model's dtype, see `of_layer`."""
    num_ranks: torch.Tensor
    """int32 [slots] padded rank of the adapter of each slot."""
    factors: torch.Tensor
    """float32 [slots, projections]; 0: the adapter has no such projection."""

    @property
    def most_ranks(self) -> int:
        """Ranks of all adapters that it has room for."""
        return RANK_UNIT * len(self.num_ranks)

    def of(self, layer: SlabLayer) -> torch.Tensor:
        """The numbers of one layer, [ranks, numbers of a rank]."""
        return of_layer(self.numbers, self.most_ranks, layer)


def of_layer(numbers: torch.Tensor, num_ranks: int, layer: SlabLayer) -> torch.Tensor:
    """The values of `num_ranks` ranks for one layer, [ranks, values of a rank]. They are
    contiguous: if a rank's values for all layers were, each rank of a product would be in another
    page of memory."""
    return numbers[num_ranks * layer.first : num_ranks * layer.end].view(num_ranks, layer.size)
