"""Compares products with block weights with their twin, for the first so many of the formats that
between them have all parts; run with another processor's features."""

from __future__ import annotations

import sys

import torch

from headwater.kernels.cpu.block_linear import block_linear
from headwater.kernels.cpu.block_rows import block_rows
from headwater.kernels.quant.block_formats import Q4_0, Q5_1, Q5_K, Q6_K, Q8_0, expand, pack
from headwater.kernels.quant.block_linear import block_linear as twin
from tests.kernels.random_blocks import random_rows

FORMATS = (Q4_0, Q5_1, Q8_0, Q5_K, Q6_K)

if __name__ == "__main__":
    for format in FORMATS[: int(sys.argv[1])]:
        weight = pack(random_rows(format, 37, 768), format)
        x = torch.randn(11, 768, generator=torch.Generator().manual_seed(3))
        x[::2, 70] = 100
        for num_rows in (1, 3, 11):
            assert torch.equal(
                block_linear(x[:num_rows], [weight]), twin(x[:num_rows], [weight])
            ), format.name
        ids = torch.tensor([36, 3])
        assert torch.equal(
            block_rows(weight, ids, torch.float32), expand(weight, torch.float32)[ids]
        ), format.name
        print(format.name)
