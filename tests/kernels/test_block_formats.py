"""Weights in GGUF's block formats: what the `gguf` package makes of the same bytes, to the bit."""

from __future__ import annotations

import gguf
import pytest
import torch

from headwater.kernels.cpu.block_rows import block_rows as kernel
from headwater.kernels.quant.block_formats import FORMATS, TILE_ROWS, BlockFormat, expand, pack
from headwater.kernels.quant.block_rows import block_rows
from tests.kernels.random_blocks import random_rows

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)


@formats
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(16, 256), (17, 768), (1, 512), (130, 256)])
def test_an_expanded_weight_has_the_bits_that_the_gguf_package_computes(
    format: BlockFormat, num_rows: int, num_inputs: int
) -> None:
    rows = random_rows(format, num_rows, num_inputs)
    expected = torch.from_numpy(
        gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(format.type_id))
    )
    weight = pack(rows, format)
    assert weight.shape == (num_rows, num_inputs)
    assert torch.equal(expand(weight, torch.float32), expected)
    assert torch.equal(expand(weight, torch.bfloat16), expected.bfloat16())


@formats
def test_a_tile_takes_the_bytes_that_its_rows_take_in_the_file(format: BlockFormat) -> None:
    rows = random_rows(format, 3 * TILE_ROWS, 512)
    assert pack(rows, format).tiles.numel() == rows.numel()
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(format.type_id)]
    assert (format.unit, format.unit_bytes) == (block_size, num_bytes)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_looked_up_are_those_of_the_expanded_table(
    format: BlockFormat, dtype: torch.dtype
) -> None:
    weight = pack(random_rows(format, 45, 512), format)
    ids = torch.tensor([44, 0, 17, 17, 15, 16, 31])
    expected = expand(weight, dtype)[ids]
    assert torch.equal(block_rows(weight, ids, dtype), expected)
    assert torch.equal(kernel(weight, ids, dtype), expected)
    assert kernel(weight, ids[:0], dtype).shape == (0, 512)
