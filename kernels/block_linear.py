"""x @ weight.T of block weights and activations in 8 bits: in plain torch, the specification of the CPU's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .block_activations import Activations, quantize, read
from .block_formats import BLOCK, BlockWeight, read_scales, read_values


def block_linear(x: torch.Tensor, parts: Sequence[BlockWeight]) -> torch.Tensor:
    """x [T, K] times parts [N_i, K], whose outputs follow one another: [T, N] in x's dtype. Dot products of blocks are
    exact; their sum is taken block after block in float32."""
    activations = read(quantize(x))
    return torch.cat([_product(activations, part) for part in parts], dim=1).to(x.dtype)


def _product(x: Activations, weight: BlockWeight) -> torch.Tensor:
    """The product with one part, float32 [T, N]."""
    scales = read_scales(weight.tiles, weight.format)
    values = read_values(weight.tiles, weight.format).flatten(0, 1).unflatten(1, (-1, BLOCK)).double()
    total = torch.zeros(len(x.scale), len(values))
    for block in range(values.shape[1]):
        own, inputs = values[:, block] - weight.format.offset, x.values[:, block].double()
        scale, minimum = _of_block(scales.scale, block, len(x.scale[0])), scales.minimum
        if scales.factor is None:
            dot = inputs @ own.t()
        else:
            # Factors of whole or half blocks.
            factors = scales.factor.flatten(0, 1).double().unflatten(1, (values.shape[1], -1))[:, block]
            dot = torch.einsum("tfi,nfi,nf->tn", *_split(inputs, own, factors.shape[1]), factors)
        product = dot.float() * (scale * x.scale[:, block, None])
        if minimum is not None and scales.min_factor is None:
            product = product + _of_block(minimum, block, len(x.scale[0])) * x.scaled_sum[:, block, None]
        elif minimum is not None:
            assert scales.min_factor is not None
            whole = x.sum[:, block, None] * _of_block(scales.min_factor, block, len(x.scale[0]))
            low = _of_block(minimum, block, len(x.scale[0])) * x.scale[:, block, None]
            product = product - whole.float() * low
        total = total + product
    return total[:, : weight.num_rows]


def _of_block(scale: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    """First scale of a block of all rows, [N], from scales [tiles, 16, sub-blocks]."""
    return scale.flatten(0, 1)[:, block * (scale.shape[2] // num_blocks)]


def _split(inputs: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.unflatten(1, (count, -1)), values.unflatten(1, (count, -1))
