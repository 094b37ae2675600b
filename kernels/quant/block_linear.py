"""x @ weight.T of block weights and activations in 8 bits: in plain torch, the specification of the
CPU's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from .block_activations import Activations, quantize, read
from .block_formats import BLOCK, BlockWeight, Scales, read_scales, read_values


def block_linear(x: torch.Tensor, parts: Sequence[BlockWeight]) -> torch.Tensor:
    """x [T, K] times parts [N_i, K], whose outputs follow one another: [T, N] in x's dtype. Dot
    products of blocks are exact; their sum is taken block after block in float32."""
    activations = read(quantize(x))
    return torch.cat([_product(activations, part) for part in parts], dim=1).to(x.dtype)


def _product(activations: Sequence[Activations], weight: BlockWeight) -> torch.Tensor:
    """The product with one part, float32 [T, N]."""
    scales = read_scales(weight.tiles, weight.format)
    num_blocks = activations[0].scale.shape[1]
    values = (
        read_values(weight.tiles, weight.format).flatten(0, 1).unflatten(1, (-1, BLOCK)).double()
    )
    total = torch.zeros(len(activations[0].scale), len(values))
    unit = weight.format.unit // BLOCK
    for first in range(0, num_blocks, unit):
        # Rests of a unit follow its blocks.
        for each, block in product(activations, range(first, first + unit)):
            part = _of_blocks(each, values[:, block] - weight.format.offset, scales, block)
            total = torch.where(each.counts[:, block, None], total + part, total)
    return total[:, : weight.num_rows]


def _of_blocks(x: Activations, own: torch.Tensor, scales: Scales, block: int) -> torch.Tensor:
    """The product of a block of each row with that block of the weight, float32 [T, outputs]."""
    num_blocks = x.scale.shape[1]
    inputs = x.values[:, block].double()
    scale = _of_block(scales.scale, block, num_blocks)
    minimum = scales.minimum
    if scales.factor is None:
        dot = inputs @ own.t()
    else:
        # Factors of whole or half blocks.
        factors = scales.factor.flatten(0, 1).double().unflatten(1, (num_blocks, -1))[:, block]
        dot = torch.einsum("tfi,nfi,nf->tn", *_split(inputs, own, factors.shape[1]), factors)
    whole = dot.float() * (scale * x.scale[:, block, None])
    if minimum is None:
        return whole
    minimum = _of_block(minimum, block, num_blocks)
    if scales.min_factor is None:
        return whole + minimum * x.scaled_sum[:, block, None]
    total = x.sum[:, block, None] * _of_block(scales.min_factor, block, num_blocks)
    return whole - total.float() * (minimum * x.scale[:, block, None])


def _of_block(scale: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    """First scale of a block of all rows, [N], from scales [tiles, 16, sub-blocks]."""
    return scale.flatten(0, 1)[:, block * (scale.shape[2] // num_blocks)]


def _split(
    inputs: torch.Tensor, values: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.unflatten(1, (count, -1)), values.unflatten(1, (count, -1))
