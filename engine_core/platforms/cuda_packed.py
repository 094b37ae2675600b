"""Products of packed weights on a GPU, by the kind of their linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeGuard

import torch

from headwater.kernels.gemm import block_gemm, byte_gemm, int4_gemm, w8a8
from headwater.kernels.gemm.product_probe import Product as ProbedProduct
from headwater.kernels.quant.token_rounding import RoundedTokens, Tokens

from ..layers.linear.int4 import Int4Linear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from ..layers.linear.ordered import OrderedLinear
from ..layers.linear.planes import PlanesLinear, PlanesTable
from ..layers.linear.rounded import RoundedLinear

PackedLinear = Int4Linear | OrderedLinear | PlanesLinear


def is_packed(linear: Linear) -> TypeGuard[PackedLinear]:
    return isinstance(linear, PackedLinear)


def packed_product(linear: PackedLinear, early_rows: int) -> Product:
    """Up to `early_rows` rows it starts while the kernel before it ends."""

    def product(x: torch.Tensor) -> torch.Tensor:
        dependent = x.shape[0] <= early_rows
        if isinstance(linear, Int4Linear):
            return int4_gemm.int4_linear(x, linear.weight, dependent=dependent)
        if isinstance(linear, PlanesLinear):
            return block_gemm.block_linear(x, linear.parts, dependent=dependent)
        return byte_gemm.byte_linear(x, linear.weight, dependent=dependent)

    return product


def is_expanded(linear: PackedLinear) -> bool:
    """Whether many rows are multiplied by an expanded matrix."""
    return not isinstance(linear, PlanesLinear) or block_gemm.is_expanded(
        linear.parts, linear.dtype
    )


def expander(linear: PackedLinear) -> Callable[[], torch.Tensor]:
    """Makes the matrix that many rows are worth."""
    if isinstance(linear, Int4Linear):
        return partial(int4_gemm.expanded, linear.weight, linear.dtype)
    if isinstance(linear, PlanesLinear):
        return partial(block_gemm.expanded, linear.parts, linear.dtype)
    return partial(byte_gemm.expanded, linear.weight, linear.dtype)


def expanded_product(linear: PackedLinear) -> ProbedProduct:
    """The product with that matrix."""
    return ProbedProduct(linear.out_features, linear.in_features, linear.dtype)


def rounded_product(linear: Linear, *, early_rows: int) -> Product:
    """Like `packed_product`, for tokens that are rounded."""
    assert isinstance(linear, RoundedLinear)
    weight = linear.weight

    def product(x: Tokens) -> torch.Tensor:
        num_tokens = (x.values if isinstance(x, RoundedTokens) else x).shape[0]
        return w8a8.w8a8_linear(x, weight, dependent=num_tokens <= early_rows)

    return product


def with_look_up(weights: Weights) -> Weights:
    """The weights, with the GPU's kernel for rows of tables that stay packed."""
    return weights.looked_up_by(PlanesTable, block_gemm.rows_of)


def launch_planes(linears: Iterable[Linear], early_rows: int) -> None:
    """Launches each kernel of the products of weights in planes once. Layers of a model differ in
    their formats, so all layers are given, not the first and last alone."""
    known = {}
    for each in linears:
        if isinstance(each, PlanesLinear):
            known[tuple((part.format.type_id, part.shape) for part in each.parts)] = each
    for each in known.values():
        block_gemm.launch_all_tiles(each.parts, each.dtype, early_rows)


def has_rounded(weights: Weights) -> bool:
    return any(isinstance(each, RoundedLinear) for each in weights.linears.values())


def launch_rounded(linears: Iterable[Linear]) -> None:
    """Launches each kernel of products with rounded activations once, so that no step compiles
    it."""
    weights = [each.weight for each in linears if isinstance(each, RoundedLinear)]
    for each in {(each.shape, each.rounding): each for each in weights}.values():
        w8a8.launch_all_tiles(each)
