"""Compares products of e4m3 weights with their twin in a process of its own; prints each format
that agrees."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.fp8_linear import fp8_linear
from headwater.kernels.quant.fp8_linear import fp8_linear as twin
from tests.kernels.random_fp8 import random_fp8, tiles_of
from tests.kernels.test_block_linear import activations

if __name__ == "__main__":
    for number, is_shared in enumerate((False, True)):
        weight = tiles_of(random_fp8(37, 192, 64, is_shared=is_shared))
        for dtype in (torch.float32, torch.bfloat16):
            x = activations(5, 192, dtype)
            assert torch.equal(fp8_linear(x, weight), twin(x, weight))
        print(number)
