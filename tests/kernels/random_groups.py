"""Random weights in groups of inputs."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.quant.group_tiles import GroupFormat, GroupTiles, pack


def random_groups(
    format: GroupFormat, num_rows: int, num_inputs: int, group_size: int, seed: int = 0, **more: Any
) -> tuple[GroupTiles, torch.Tensor]:
    """Tiles, and the weight [N, K] in float64, from its definition."""
    generator = torch.Generator().manual_seed(seed)
    most = 1 << format.bits
    num_groups = num_inputs // group_size
    values = torch.randint(0, most, (num_rows, num_inputs), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, most, (num_groups, num_rows), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(num_groups, num_rows, generator=generator) / most + 1e-3).to(
        format.scale_dtype
    )
    tiles = pack(values, scales, zeros, format.bits)
    weight = GroupTiles(
        format=format, tiles=tiles, num_rows=num_rows, group_size=group_size, **more
    )
    of_inputs = torch.arange(num_inputs) // group_size
    exact = (values.double() - zeros.t().double()[:, of_inputs]) * scales.t().double()[:, of_inputs]
    if weight.order is not None:
        exact = exact[:, weight.order.argsort()]
    return weight, exact
