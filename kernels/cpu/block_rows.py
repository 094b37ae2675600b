"""Rows of a table in a block format on a CPU. Twin: `kernels.quant.block_rows`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..quant.block_formats import TILE_ROWS, BlockFormat, BlockWeight
from .block_tiles import expand_row
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import int64_at, size_of
from .compiler.simd_types import BF16_ELEMENT, F32_ELEMENT


def block_rows(weight: BlockWeight, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of weight [N, K] at row_ids, int64 [T] within 0…N - 1, as [T, K] of the dtype."""
    assert row_ids.dtype == torch.int64
    assert row_ids.is_contiguous()
    out = torch.empty(len(row_ids), weight.shape[1], dtype=dtype)
    kernel_of(weight.format)(
        dtype,
        len(row_ids),
        out.numel(),
        weight.tiles.data_ptr(),
        weight.tiles.shape[1],
        weight.tiles.stride(0),
        row_ids.data_ptr(),
        out.data_ptr(),
        out.stride(0),
    )
    return out


@cache
def kernel_of(format: BlockFormat) -> Kernel:
    return Kernel(_work(format.type_id, F32_ELEMENT), _work(format.type_id, BF16_ELEMENT))


def _work(type_id: int, element: Any) -> Any:
    def work(arguments: int) -> None:
        units = argument(arguments, 1)
        tile_bytes = argument(arguments, 2)
        out_bytes = argument(arguments, 5) * size_of(element)
        for item in items(arguments):
            row = int64_at(argument(arguments, 3) + 8 * item)
            p_tile = argument(arguments, 0) + row // TILE_ROWS * tile_bytes
            expand_row(
                p_tile,
                units,
                row % TILE_ROWS,
                argument(arguments, 4) + item * out_bytes,
                type_id,
                element,
            )

    return work
