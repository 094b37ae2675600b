"""Sequences through a kernel of state layers on a CPU in passes of any sizes, with pages made by
hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from headwater.kernels.delta.delta_arguments import StateMemory

BLOCK = 16
LENGTH = 50
"""Three borders, and two tokens."""
BORDERS = [
    [*range(1, LENGTH + 1)],
    [1, LENGTH],
    [15, LENGTH],
    [16, LENGTH],
    [17, LENGTH],
    [2, 18, 34, LENGTH],
    [*range(7, LENGTH, 7), LENGTH],
    [32, 33, 48, LENGTH],
]
"""Ends of passes."""
FIRST_UNIT = 1
UNITS_PER_PAGE = 2


def in_steps(
    kernel: Callable[..., torch.Tensor],
    layer: Any,
    inputs: Sequence[torch.Tensor],
    borders: Sequence[int],
    num_bytes: int,
) -> torch.Tensor:
    """Outputs of all rows, one after another, of passes that end at the borders, or with a shorter
    row. `num_bytes` of a unit. Pages hold garbage before they are written."""
    unit_bytes = -(-num_bytes // 128) * 128
    num_pages = -(-(FIRST_UNIT + layer.num_units) // UNITS_PER_PAGE)
    num_sets = LENGTH // BLOCK + 1
    pages = torch.full((len(inputs) * num_sets * num_pages, 2 * unit_bytes), 255, dtype=torch.uint8)

    def pages_of(positions: list[int]) -> torch.Tensor:
        sets = [row * num_sets + position // BLOCK for row, position in enumerate(positions)]
        own = [[each * num_pages + i for i in range(num_pages)] for each in sets]
        return torch.tensor(own).int()

    outputs: list[list[torch.Tensor]] = [[] for _ in inputs]
    for begin, end in pairwise([0, *borders]):
        starts = [min(begin, len(each)) for each in inputs]
        ends = [min(end, len(each)) for each in inputs]
        lengths = [stop - start for start, stop in zip(starts, ends, strict=True)]
        memory = StateMemory(
            pages=pages,
            first=pages_of(starts),
            last=pages_of(ends),
            starts=torch.tensor(starts).int(),
            ends=torch.tensor(ends).int(),
            tokens=torch.tensor([sum(lengths[:row]) for row in range(len(inputs))]).int(),
            unit_bytes=unit_bytes,
            units_per_page=UNITS_PER_PAGE,
            first_unit=FIRST_UNIT,
        )
        spans = zip(inputs, starts, ends, strict=True)
        batch = torch.cat([each[start:stop] for each, start, stop in spans])
        for own, made in zip(outputs, kernel(batch, layer, memory).split(lengths), strict=True):
            own.append(made)
    return torch.cat([torch.cat(own) for own in outputs])
