"""Products of a weight on a CPU, by the kind of its linear layer: our kernels', and the library's
in groups of rows that give a row the same bits in any batch."""

from __future__ import annotations

from functools import cache, partial

import torch

from headwater.kernels.cpu import block_linear, fp8_linear, group_linear
from headwater.kernels.cpu.activation import activation as activated
from headwater.kernels.cpu.packed_linear import biased_linear
from headwater.kernels.cpu.row_stable_linear import (
    FIXED_ROWS,
    MAX_ROWS,
    PACKED,
    PLAIN,
    Library,
    RowRule,
    row_rule,
    row_stable_linear,
)

from ..layers.linear.blocks import BlockLinear
from ..layers.linear.dense import DenseLinear
from ..layers.linear.fp8_tiles import Fp8TileLinear
from ..layers.linear.group_tiles import TileLinear
from ..layers.linear.linear import Linear, Product
from ..layers.linear.packed import PackedLinear

TEXT_ROWS = 512
"""Rows of the largest product of an encoder, whose steps have thousands of tokens."""


class CpuProducts:
    def __init__(self) -> None:
        self._libraries: dict[str, Library] = {DenseLinear.kind: PLAIN, PackedLinear.kind: PACKED}

    def of(self, linear: Linear) -> Product:
        if isinstance(linear, BlockLinear):
            return block_linear.block_product(linear.parts)
        if isinstance(linear, TileLinear):
            return group_linear.group_product(linear.tiles)
        if isinstance(linear, Fp8TileLinear):
            return fp8_linear.fp8_product(linear.tiles)
        library = self._libraries.get(linear.kind)
        if library is None:
            return linear.product
        weight: torch.Tensor = linear.weight  # type: ignore[attr-defined]  # kinds of these libraries have one
        rule = self._row_rule(linear.kind, weight)

        def product(x: torch.Tensor) -> torch.Tensor:
            # Keyed by the layer: a packed weight is a view of memory that the layer holds.
            return row_stable_linear(x, linear.weight, rule, library)  # type: ignore[attr-defined]

        return product

    def biased(self, linear: Linear, bias: torch.Tensor, activation: str) -> Product:
        """activation(product + bias), in one call of the library where it has a fused product."""
        if not isinstance(linear, PackedLinear) or activation not in ("", "gelu"):
            product = self.of(linear)
            if not activation:
                return lambda x: product(x) + bias
            return lambda x: activated(product(x) + bias, activation)
        rule = self._row_rule(linear.kind, linear.weight, max_rows=TEXT_ROWS, fixed_rows=MAX_ROWS)
        multiply = partial(biased_linear, bias=bias, has_gelu=activation == "gelu")
        library = Library(multiply, PACKED.prepare)

        def fused(x: torch.Tensor) -> torch.Tensor:
            # Passes the layer, not its weight, as above.
            return row_stable_linear(x, linear.weight, rule, library)

        return fused

    def _row_rule(
        self,
        kind: str,
        weight: torch.Tensor,
        *,
        max_rows: int = MAX_ROWS,
        fixed_rows: int = FIXED_ROWS,
    ) -> RowRule:
        library = self._libraries[kind]
        rows = max_rows, fixed_rows
        return _probed_rule(*weight.shape, weight.dtype, library, *rows, torch.get_num_threads())


@cache
def _probed_rule(
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    library: Library,
    max_rows: int,
    fixed_rows: int,
    num_threads: int,
) -> RowRule:
    """See `row_rule`. A library may choose its kernel by the number of threads too."""
    return row_rule(
        num_outputs, num_inputs, dtype, library, max_rows=max_rows, fixed_rows=fixed_rows
    )
