"""Products of matrices in the model's dtype on a GPU: cuBLASLt's, or ours where a probe found other
bits in those; and sums of products and biases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from headwater.kernels.gemm.add_bias import add_bias
from headwater.kernels.gemm.gemm import linear, linear_pair, linear_silu_mul

from ..layers.biased import BiasedLinear
from ..layers.linear.dense import DenseLinear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product, ProductPair


@dataclass(slots=True)
class ProductChoice:
    """Whether our kernel computes a product instead of the library. Layers hold this object before
    the choice is made."""

    is_own: bool = False


def matrix_of(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


def dense_matrices(weights: Weights) -> dict[str, torch.Tensor]:
    """Matrices of linear layers, by name."""
    return {
        name: matrix_of(each)
        for name, each in weights.linears.items()
        if each.kind == DenseLinear.kind
    }


def dense_product(
    weight: torch.Tensor,
    choice: ProductChoice,
    early_rows: int,
    bias: torch.Tensor | None = None,
) -> Product:
    """Up to so many rows a product starts while the kernel before it ends. bias [N]: added to the
    product."""
    return partial(_linear, weight=weight, bias=bias, choice=choice, early_rows=early_rows)


def dense_silu_product(weight: torch.Tensor, choice: ProductChoice, early_rows: int) -> Product:
    """Like `dense_product`, with SiLU of the first half of the outputs times the second behind
    it."""
    return partial(_linear_silu_mul, weight=weight, choice=choice, early_rows=early_rows)


def dense_pair(
    weights: tuple[torch.Tensor, torch.Tensor],
    choices: tuple[ProductChoice, ProductChoice],
    early_rows: int,
) -> ProductPair:
    """Like `dense_product`, of two weights."""
    return partial(_linear_pair, weights=weights, choices=choices, early_rows=early_rows)


def _linear_pair(
    x: torch.Tensor,
    *,
    weights: tuple[torch.Tensor, torch.Tensor],
    choices: tuple[ProductChoice, ProductChoice],
    early_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    are_own = choices[0].is_own, choices[1].is_own
    return linear_pair(x, *weights, dependent=x.shape[0] <= early_rows, are_own=are_own)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    choice: ProductChoice,
    early_rows: int,
) -> torch.Tensor:
    is_early = x.shape[0] <= early_rows
    return linear(x, weight, bias=bias, dependent=is_early, is_own=choice.is_own)


def _linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, *, choice: ProductChoice, early_rows: int
) -> torch.Tensor:
    return linear_silu_mul(x, weight, dependent=x.shape[0] <= early_rows, is_own=choice.is_own)


def biased_product(linear: Linear, *, early_rows: int) -> Product:
    """Up to `early_rows` rows the bias is added while the product ends."""
    assert isinstance(linear, BiasedLinear)
    unbiased = linear.unbiased
    bias = linear.bias

    def product(x: torch.Tensor) -> torch.Tensor:
        out = unbiased(x)
        add_bias(out, bias, dependent=out.shape[0] <= early_rows)
        return out

    return product
