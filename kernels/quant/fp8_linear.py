"""x @ weight.T of e4m3 weights, or of MXFP4, and activations in the model's type: in plain torch,
the specification of the CPU's kernel."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .block_formats import BLOCK
from .fp8_tiles import Fp8Tiles, expanded

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def fp8_linear(x: torch.Tensor, weight: Fp8Tiles) -> torch.Tensor:
    """x [T, K] times weight [N, K]: [T, N] in x's dtype. Weights are those expanded to x's dtype.
    Sums of 32 inputs are taken input after input in float32, every product added with one rounding;
    sums of blocks follow one another."""
    return expanded_linear(x, expanded(weight, x.dtype))


def expanded_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Like `fp8_linear`, for a weight [N, K] in x's dtype."""
    inputs = x.double().numpy()
    numbers = weight.double().numpy()
    total = np.zeros((len(inputs), len(numbers)), np.float32)
    for block in range(0, inputs.shape[1], BLOCK):
        part = np.zeros_like(total)
        for k in range(block, block + BLOCK):
            part = _add_product(part, inputs[:, k, None], numbers[:, k])
        total = total + part
    return torch.from_numpy(total).to(x.dtype)


def _add_product(total: Floats, x: Doubles, weight: Doubles) -> Floats:
    """total float32 + x · weight, rounded once: products of two float32 numbers are exact in
    float64, and their sums are rounded to odd there, so that rounding to float32 sees on which side
    of a middle they are."""
    product = x * weight
    start = total.astype(np.float64)
    found = start + product
    # Knuth's two-sum: the part that rounding took.
    other = found - start
    rest = (start - (found - other)) + (product - other)
    is_even = (found.view(np.int64) & 1) == 0
    towards = np.where(rest > 0, np.inf, -np.inf)
    odd: Doubles = np.where((rest != 0) & is_even, np.nextafter(found, towards), found)
    return odd.astype(np.float32)
