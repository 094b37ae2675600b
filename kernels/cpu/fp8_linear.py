"""x @ weight.T of e4m3 weights, or of MXFP4, on a CPU, which reads eight or four bits a weight,
tile after tile of sixteen outputs. Twin: `kernels.quant.fp8_linear`.

Every output is a sum in one order along K, so bits depend neither on how many rows are computed
together nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..quant.block_formats import BLOCK
from ..quant.fp8_tiles import Fp8Tiles
from .fp8_tiles import units_of
from .tile_kernel import kernel_of
from .tile_product import ITEMS_PER_THREAD


def fp8_product(weight: Fp8Tiles) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of x [T, K], contiguous, as [T, N] in x's dtype, float32 or bfloat16."""
    tiles, (num_outputs, num_inputs) = weight.tiles, weight.shape
    kernel = kernel_of(weight.format)
    tile_bytes = tiles.shape[1] * tiles.shape[2]
    units = units_of(tiles.shape[1], weight.group_size // BLOCK)

    def product(x: torch.Tensor) -> torch.Tensor:
        rows = x.float().contiguous()
        out = x.new_empty(len(x), num_outputs)
        tiles_per_item = max(1, len(tiles) // (ITEMS_PER_THREAD * torch.get_num_threads()))
        kernel(
            x.dtype,
            -(-len(tiles) // tiles_per_item),
            tiles.numel(),
            *(tiles.data_ptr(), units, tile_bytes, rows.data_ptr(), 4 * num_inputs),
            *(out.data_ptr(), num_outputs, len(x), num_outputs, tiles_per_item, 0, 0),
        )
        return out

    return product


def fp8_linear(x: torch.Tensor, weight: Fp8Tiles) -> torch.Tensor:
    """x [T, K], contiguous, times weight [N, K]: [T, N] in x's dtype."""
    return fp8_product(weight)(x)
