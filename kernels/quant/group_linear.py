"""x @ weight.T of weights in groups and activations in 8 bits: in plain torch, the specification of
the CPU's kernel."""

from __future__ import annotations

import torch

from .block_activations import quantize, quantize_tokens, read
from .block_formats import BLOCK
from .group_tiles import GroupTiles
from .group_tiles import read as read_tiles


def group_linear(x: torch.Tensor, weight: GroupTiles) -> torch.Tensor:
    """x [T, K] times weight [N, K]: [T, N] in x's dtype. Dot products of 32 inputs are exact; their
    sum is taken block after block in float32."""
    ordered = x if weight.order is None else x[:, weight.order]
    activations = read(quantize_tokens(ordered) if weight.rounds_tokens else quantize(ordered))
    numbers = read_tiles(weight)
    blocks_of_group = weight.group_size // BLOCK
    values = numbers.values.unflatten(1, (-1, BLOCK)).double()
    total = torch.zeros(len(x), weight.num_rows)
    for block in range(values.shape[1]):
        group = block // blocks_of_group
        own = values[:, block] - numbers.zeros[:, group, None].double()
        for each in activations:
            dot = each.values[:, block].double() @ own.t()
            product = dot.float() * (numbers.scales[:, group] * each.scale[:, block, None])
            total = torch.where(each.counts[:, block, None], total + product, total)
    return total.to(x.dtype)
