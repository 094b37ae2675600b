"""Products with low-rank adapters, each row's own: y += (x Aᵀ) Bᵀ * factor. Source: Hu et al.,
"LoRA", 2021. The twin is the specification of the kernels."""

from __future__ import annotations

import torch

from .slab import PIECE, RANK_UNIT, Slab, SlabLayer


def add_adapters_twin(
    x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, slab: Slab, layer: SlabLayer
) -> None:
    """Adds to rows of y [T, N] the products of x [T, K] with the adapters of their slots, int32
    [T]; −1: none, whose row is not written.

    x Aᵀ is summed in float32 in pieces of `PIECE` inputs, and rounded to x's dtype; its product
    with B is summed in float32, times the factor, added to y in float32 and rounded once."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            _add_to_row(x[row], y[row], slot, slab, layer)


def _add_to_row(x: torch.Tensor, y: torch.Tensor, slot: int, slab: Slab, layer: SlabLayer) -> None:
    first = slot * RANK_UNIT
    ranks = slab.of(layer)[first : first + int(slab.num_ranks[slot])]
    pieces = torch.split(x.float(), PIECE)
    for i, (start, size) in enumerate(zip(layer.part_starts, layer.parts, strict=True)):
        factor = slab.factors[slot, layer.column + i]
        if factor == 0:
            continue
        first_a = i * layer.num_inputs
        a = ranks[:, first_a : first_a + layer.num_inputs].float()
        shrunk = torch.zeros(len(ranks), device=x.device)
        for piece, factors in zip(pieces, torch.split(a, PIECE, 1), strict=True):
            shrunk = shrunk + factors @ piece
        first_b = layer.first_b + start
        b = ranks[:, first_b : first_b + size].float()
        delta = shrunk.to(x.dtype).float() @ b * factor
        y[start : start + size] = (y[start : start + size].float() + delta).to(y.dtype)
