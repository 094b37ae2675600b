"""Products of a weight on an NVIDIA GPU, by the kind of its linear layer: our kernels', and
cuBLASLt's where its bits are those of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from headwater.kernels.gemm import product_probe
from headwater.kernels.gemm.gemm import RING_TILES, choose_ring
from headwater.kernels.gemm.product_probe import Product as ProbedProduct
from headwater.kernels.gemm.wide_gemm import launch_all_tiles
from headwater.kernels.launch.device import kernel_cache_dir

from ..layers.adapters.row_adapters import AdaptedLinear
from ..layers.biased import BiasedLinear
from ..layers.linear.dense import DenseLinear
from ..layers.linear.int4 import Int4Linear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product, ProductPair
from ..layers.linear.ordered import OrderedLinear
from ..layers.linear.planes import PlanesLinear
from ..layers.linear.rounded import RoundedLinear
from . import dense_products
from .cuda_experts import CudaExperts
from .cuda_packed import (
    expanded_product,
    expander,
    is_expanded,
    is_packed,
    launch_planes,
    launch_rounded,
    packed_product,
    rounded_product,
)
from .product_verdicts import ProductVerdicts
from .product_verdicts import own_products as own_products_of

EARLY_ROWS = 512
"""Up to this many tokens everything but attention and cuBLASLt's products starts while the kernel
before it ends; of more it is a loss."""


class CudaProducts:
    def __init__(self, device: torch.device, num_chosen: int) -> None:
        """num_chosen: experts a token; 0 without experts."""
        self._device = device
        self._num_chosen = num_chosen
        self.are_early = False
        """Whether products of few tokens fill rings with weights before their tokens are there."""
        self._choices: dict[ProbedProduct, dense_products.ProductChoice] = {}
        self._products: dict[str, Callable[[Linear], Product]] = {
            DenseLinear.kind: self._dense,
            Int4Linear.kind: self._packed,
            OrderedLinear.kind: self._packed,
            PlanesLinear.kind: self._packed,
            RoundedLinear.kind: partial(rounded_product, early_rows=EARLY_ROWS),
            BiasedLinear.kind: self._biased,
        }
        self.experts = CudaExperts(EARLY_ROWS)
        self._gated = {(DenseLinear.kind, "silu"): self._dense_silu}

    def of(self, linear: Linear) -> Product:
        make = self._products.get(linear.kind)
        return linear.product if make is None else make(linear)

    def gated(self, linear: Linear, activation: str) -> Product | None:
        """Product with a fused gate; None: there is no such kernel."""
        if isinstance(linear, AdaptedLinear):
            return linear.gated(activation)
        make = self._gated.get((linear.kind, activation))
        return None if make is None else make(linear)

    def pair(self, first: Linear, second: Linear) -> ProductPair:
        """The products of two weights, in one launch where their kernels allow it."""
        products = self.of(first), self.of(second)
        if not isinstance(first, DenseLinear) or not isinstance(second, DenseLinear):
            return lambda x: (products[0](x), products[1](x))
        weights = first.weight, second.weight
        choices = tuple(self._choice(ProbedProduct.of(weight)) for weight in weights)
        return dense_products.dense_pair(weights, (choices[0], choices[1]), EARLY_ROWS)

    @property
    def own(self) -> frozenset[ProbedProduct]:
        """Products that the library makes with other bits, see `prepare`, and those of expanded
        matrices."""
        return frozenset(product for product, choice in self._choices.items() if choice.is_own)

    def prepare(
        self, weights: Weights, row_counts: Sequence[int], head_row_counts: Sequence[int]
    ) -> None:
        """Compares the library's bits with those of our kernels for these weights and numbers of
        rows, unless this machine has done so before. Products whose bits differ are computed by our
        kernels from now on, also in existing layers."""
        dense = dense_products.dense_matrices(weights)
        products = {name: ProbedProduct.of(weight) for name, weight in dense.items()}
        counts = {
            product: head_row_counts for name, product in products.items() if name == "lm_head"
        }
        counts |= {product: row_counts for name, product in products.items() if name != "lm_head"}
        verdicts = ProductVerdicts(
            kernel_cache_dir() / "products", product_probe.facts(self._device)
        )
        matrices = {products[name]: weight for name, weight in dense.items()}
        probe = partial(product_probe.differing, device=self._device, weights=matrices)
        for product in own_products_of(counts, verdicts, probe):
            self._choice(product).is_own = True
        # Other products were not compared: routers that stay in float32.
        for product in self._choices.keys() - counts.keys():
            self._choice(product).is_own = True
        torch.cuda.empty_cache()

    def probes(self, weights: Weights) -> bool:
        """Whether `prepare` has products of these weights to compare."""
        return bool(dense_products.dense_matrices(weights))

    def launch_probe(self, weights: Weights) -> None:
        """Launches each kernel that `prepare` compares with once."""
        for weight in {
            weight.dtype: weight for weight in dense_products.dense_matrices(weights).values()
        }.values():
            product_probe.launch_reference(weight)

    def launch_own(self, weights: Weights) -> None:
        """Launches each of our kernels that replaces the library's product once, so that no step
        compiles it."""
        dense = {
            ProbedProduct.of(weight): weight
            for weight in dense_products.dense_matrices(weights).values()
        }
        expanders = {
            expanded_product(each): expander(each)
            for each in weights.linears.values()
            if is_packed(each)
        }
        for product in self.own:
            if product in dense:
                launch_all_tiles(dense[product])
            elif product in expanders:
                launch_all_tiles(expanders[product]())
        launch_planes(weights.linears.values(), EARLY_ROWS)
        launch_rounded(weights.linears.values())
        if weights.experts:
            self.experts.launch_all(self._num_chosen)

    def _dense(self, linear: Linear) -> Product:
        weight = dense_products.matrix_of(linear)
        # Those of few outputs follow kernels that start them early enough.
        if choose_ring(weight[:1], weight) == RING_TILES:
            self.are_early = True
        return dense_products.dense_product(
            weight, self._choice(ProbedProduct.of(weight)), EARLY_ROWS
        )

    def _biased(self, linear: Linear) -> Product:
        assert isinstance(linear, BiasedLinear)
        if linear.linear.kind != DenseLinear.kind:
            return dense_products.biased_product(linear, early_rows=EARLY_ROWS)
        weight = dense_products.matrix_of(linear.linear)
        choice = self._choice(ProbedProduct.of(weight))
        return dense_products.dense_product(weight, choice, EARLY_ROWS, linear.bias)

    def _dense_silu(self, linear: Linear) -> Product:
        weight = dense_products.matrix_of(linear)
        return dense_products.dense_silu_product(
            weight, self._choice(ProbedProduct.of(weight)), EARLY_ROWS
        )

    def _packed(self, linear: Linear) -> Product:
        assert is_packed(linear)
        self.are_early = True
        # Weights of this kind are always multiplied by our kernels, so there is nothing to compare.
        if is_expanded(linear):
            self._choice(expanded_product(linear)).is_own = True
        return packed_product(linear, EARLY_ROWS)

    def _choice(self, product: ProbedProduct) -> dense_products.ProductChoice:
        return self._choices.setdefault(product, dense_products.ProductChoice())
