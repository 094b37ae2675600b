"""GGUF's block formats as planes: the same weights, to the bit, in as many bytes as in a file or a
few more."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.quant import block_formats, block_planes
from headwater.kernels.quant.block_formats import FORMATS, BlockFormat, pack
from headwater.kernels.quant.block_planes import planes_of
from tests.kernels.random_blocks import random_rows

EVERY = list(FORMATS.values())


def sizes(format: BlockFormat) -> list[tuple[int, int]]:
    """[N, K] whole in no number of tiles, of rows and of inputs."""
    return [(37, 3 * format.unit), (16, 4 * format.unit), (1030, 2 * format.unit)]


@pytest.mark.parametrize("format", EVERY, ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_planes_expand_to_the_bits_of_the_blocks(format: BlockFormat, dtype: torch.dtype) -> None:
    for n, k in sizes(format):
        weight = pack(random_rows(format, n, k, seed=n), format)
        planes = planes_of(weight)
        assert planes.shape == (n, k)
        assert torch.equal(block_planes.expand(planes, dtype), block_formats.expand(weight, dtype))


@pytest.mark.parametrize("format", EVERY, ids=lambda format: format.name)
def test_planes_take_at_most_three_percent_more_than_the_file(format: BlockFormat) -> None:
    rows = random_rows(format, 64, 2 * format.unit)
    assert rows.nbytes <= planes_of(pack(rows, format)).num_bytes <= 1.03 * rows.nbytes
