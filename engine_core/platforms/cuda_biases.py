"""Linear layers with a bias on a GPU."""

from __future__ import annotations

import torch

from headwater.kernels.gemm.add_bias import add_bias

from ..layers.biased import BiasedLinear
from ..layers.linear.linear import Linear, Product


def biased_product(linear: Linear, *, early_rows: int) -> Product:
    """Up to `early_rows` rows the sum starts while the product ends."""
    assert isinstance(linear, BiasedLinear)
    unbiased = linear.unbiased
    bias = linear.bias

    def product(x: torch.Tensor) -> torch.Tensor:
        out = unbiased(x)
        add_bias(out, bias, dependent=out.shape[0] <= early_rows)
        return out

    return product
