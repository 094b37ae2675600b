"""Operations of a GPU with `numerics` tree: the bits of a row depend neither on the number of ranks
nor on a library.

Headwater's products have the same bits for any number of outputs, attention and norms for any
number of heads. Products whose inputs ranks divide are those of `kernels.gemm.tree_gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from headwater.kernels.gemm.product_probe import Product as ProbedProduct
from headwater.kernels.gemm.tree_gemm import launch_all_tiles, tree_gemm

from ..layers.leaf_matrix import LeafLinear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from .cuda import CudaPlatform
from .cuda_products import EARLY_ROWS, CudaProducts
from .dense_products import ProductChoice


class TreeProducts(CudaProducts):
    """Products of tree numerics: none is left to the library, so there is nothing to probe."""

    def probes(self, weights: Weights) -> bool:
        return False

    def prepare(
        self, weights: Weights, row_counts: Sequence[int], head_row_counts: Sequence[int]
    ) -> None:
        pass

    def launch_own(self, weights: Weights) -> None:
        super().launch_own(weights)
        linears = [each for each in weights.linears.values() if isinstance(each, LeafLinear)]
        for each in {(*each.weight.shape, each.num_leaves): each for each in linears}.values():
            launch_all_tiles(each.weight, each.num_leaves, _out_dtype(each))

    def of(self, linear: Linear) -> Product:
        return (
            partial(_leaf_product, linear) if isinstance(linear, LeafLinear) else super().of(linear)
        )

    def _choice(self, product: ProbedProduct) -> ProductChoice:
        return self._choices.setdefault(product, ProductChoice(is_own=True))


class TreePlatform(CudaPlatform):
    """See `Platform`."""

    _products_class = TreeProducts


def _leaf_product(linear: LeafLinear, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], linear.out_features, dtype=_out_dtype(linear), device=x.device)
    tree_gemm(x, linear.weight, linear.num_leaves, out, dependent=x.shape[0] <= EARLY_ROWS)
    return out


def _out_dtype(linear: LeafLinear) -> torch.dtype:
    return linear.weight.dtype if linear.is_whole else torch.float32
