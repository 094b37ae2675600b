"""Activations in 8 bits on a CPU. Twin: `kernels.quant.block_activations`."""

from __future__ import annotations

from typing import Any

import torch

from ..quant.block_activations import NUM_PARTS, NUM_PARTS_OF_TOKENS, ROW_BYTES
from ..quant.block_formats import BLOCK
from .block_rounding import quantize_blocks, quantize_rows
from .compiler.compiled import Kernel, argument, items
from .compiler.scalars import size_of
from .compiler.simd_types import BF16_ELEMENT, F32_ELEMENT


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K], contiguous, to uint8 [T, 2, K / 32, 48]. The place of a rest that no block
    has holds anything."""
    return _quantized(x, KERNEL, NUM_PARTS)


def quantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """Rounds x [T, K], contiguous, to uint8 [T, 1, K / 32, 48], with one scale for all inputs of a
    row."""
    return _quantized(x, TOKEN_KERNEL, NUM_PARTS_OF_TOKENS)


def _quantized(x: torch.Tensor, kernel: Kernel, num_parts: int) -> torch.Tensor:
    assert x.is_contiguous()
    num_rows = x.shape[0]
    num_blocks = x.shape[1] // BLOCK
    rows = torch.empty(num_rows, num_parts, num_blocks, ROW_BYTES, dtype=torch.uint8)
    kernel(x.dtype, num_rows, 2 * x.numel(), x.data_ptr(), rows.data_ptr(), num_blocks)
    return rows


def _rows(rounds_tokens: bool, element: Any) -> Any:
    num_parts = NUM_PARTS_OF_TOKENS if rounds_tokens else NUM_PARTS

    def work(arguments: int) -> None:
        num_blocks = argument(arguments, 2)
        row_size = num_blocks * BLOCK * size_of(element)
        row_bytes = num_parts * num_blocks * ROW_BYTES
        for row in items(arguments):
            p_x = argument(arguments, 0) + row * row_size
            p_out = argument(arguments, 1) + row * row_bytes
            if rounds_tokens:
                quantize_rows(p_x, p_out, 1, num_blocks, element)
            else:
                quantize_blocks(p_x, p_out, 1, num_blocks, element)

    return work


KERNEL = Kernel(_rows(False, F32_ELEMENT), _rows(False, BF16_ELEMENT))
TOKEN_KERNEL = Kernel(_rows(True, F32_ELEMENT), _rows(True, BF16_ELEMENT))
