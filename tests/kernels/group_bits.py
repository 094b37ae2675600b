"""Compares products with weights in the first so many formats of groups with their twin; run with
another processor's features."""

from __future__ import annotations

import sys

import torch

from headwater.kernels.cpu.group_linear import group_linear
from headwater.kernels.quant.group_linear import group_linear as twin
from headwater.kernels.quant.group_tiles import GROUP_FORMATS
from tests.kernels.random_groups import random_groups

if __name__ == "__main__":
    for number, format in enumerate(GROUP_FORMATS[: int(sys.argv[1])]):
        weight, _ = random_groups(format, 37, 256, 128, rounds_tokens=number % 2 == 1)
        x = torch.randn(11, 256, generator=torch.Generator().manual_seed(3))
        x[::2, 70] = 100
        for num_rows in (1, 3, 11):
            assert torch.equal(group_linear(x[:num_rows], weight), twin(x[:num_rows], weight)), (
                format
            )
        print(number)
