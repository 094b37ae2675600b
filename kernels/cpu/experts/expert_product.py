"""Products of rows with the packed weights of their experts on a CPU, in one call for all experts
of a layer.

An expert's tiles are read once for all of its rows, those of experts without rows never. A row has
the bits that the product with its expert's weight alone gives it (`tile_kernel`)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ...quant.block_formats import BlockFormat
from ...quant.fp8_tiles import Fp8Format
from ...quant.group_tiles import GroupFormat
from ..block_activations import quantize, quantize_tokens
from ..compiler.compiled import Kernel, argument, items
from ..compiler.scalars import int64_at, size_of
from ..compiler.simd_types import BF16_ELEMENT, F32_ELEMENT
from ..tile_kernel import multiply_tiles, num_parts_of, number_of, passes_eight
from .expert_rows import RowsByExpert

ITEMS_PER_THREAD = 4
"""Items of each expert's tiles."""
_LONG = 8


class ExpertTiles(NamedTuple):
    """Weights [N, K] of all experts of a layer, in tiles of one format."""

    format: BlockFormat | GroupFormat | Fp8Format
    tiles: torch.Tensor
    """uint8 [E N / 16, units, bytes]"""
    units: int
    """Number of units in a tile, as its format counts them."""
    num_experts: int
    num_outputs: int
    """N, a multiple of 16"""
    num_inputs: int
    rounds_tokens: bool = False
    """Whether activations are rounded with one scale for a row rather than one for 32 inputs."""


class ExpertProduct:
    """Rows [P, K] by place → [P, N]."""

    def __init__(self, weight: ExpertTiles) -> None:
        self._weight = weight
        self._kernel = kernel_of(weight.format, rounds_tokens=weight.rounds_tokens)
        self._rounds = not isinstance(weight.format, Fp8Format)

    def __call__(self, x: torch.Tensor, rows: RowsByExpert) -> torch.Tensor:
        weight = self._weight
        num_tiles = len(weight.tiles) // weight.num_experts
        tiles_per_item = -(-num_tiles // (ITEMS_PER_THREAD * torch.get_num_threads()))
        items_each = -(-num_tiles // tiles_per_item)
        activations = self._activations(x)
        out = x.new_empty(len(x), weight.num_outputs)
        num_chosen = len(rows.chosen)
        self._kernel(
            x.dtype,
            num_chosen * items_each,
            num_chosen * num_tiles * weight.tiles[0].numel(),
            *(weight.tiles.data_ptr(), weight.units, weight.tiles[0].numel(), num_tiles),
            *(activations.data_ptr(), activations[0].nbytes),
            *(out.data_ptr(), weight.num_outputs, tiles_per_item, items_each),
            *(rows.starts.data_ptr(), rows.chosen.data_ptr()),
        )
        return out

    def _activations(self, x: torch.Tensor) -> torch.Tensor:
        """Activations as the kernel reads them; those of e4m3 weights are not rounded."""
        if not self._rounds:
            return x.float()
        return quantize_tokens(x) if self._weight.rounds_tokens else quantize(x)


@cache
def kernel_of(
    format: BlockFormat | GroupFormat | Fp8Format, *, rounds_tokens: bool = False
) -> Kernel:
    number = number_of(format)
    return Kernel(
        _work(number, rounds_tokens, F32_ELEMENT), _work(number, rounds_tokens, BF16_ELEMENT)
    )


def _work(number: int, rounds_tokens: bool, element: Any) -> Any:
    num_parts = num_parts_of(rounds_tokens)
    has_eight = passes_eight(number)

    def work(arguments: int) -> None:
        tile_bytes = argument(arguments, 2)
        num_tiles = argument(arguments, 3)
        row_bytes = argument(arguments, 5)
        num_outputs = argument(arguments, 7)
        out_bytes = num_outputs * size_of(element)
        tiles_per_item = argument(arguments, 8)
        items_each = argument(arguments, 9)
        for item in items(arguments):
            expert = int64_at(argument(arguments, 11) + item // items_each * _LONG)
            if expert >= 0:
                p_start = argument(arguments, 10) + expert * _LONG
                row = int64_at(p_start)
                first = item % items_each * tiles_per_item
                multiply_tiles(
                    argument(arguments, 0) + expert * num_tiles * tile_bytes,
                    tile_bytes,
                    argument(arguments, 1),
                    argument(arguments, 4) + row * row_bytes,
                    row_bytes,
                    argument(arguments, 6) + row * out_bytes,
                    out_bytes,
                    int64_at(p_start + _LONG) - row,
                    num_outputs,
                    first,
                    min(first + tiles_per_item, num_tiles),
                    number,
                    num_parts,
                    has_eight,
                    element,
                )

    return work
