"""Products of a weight on a CPU, by the kind of its linear layer: our kernels', and the library's in
groups of rows that give a row the same bits in any batch."""

from __future__ import annotations

import torch

from headwater.kernels.cpu import block_linear, fp8_linear, group_linear
from headwater.kernels.cpu.row_stable_linear import (
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


class CpuProducts:
    def __init__(self) -> None:
        self._libraries: dict[str, Library] = {DenseLinear.kind: PLAIN, PackedLinear.kind: PACKED}
        self._row_rules: dict[tuple[str, torch.dtype, tuple[int, ...]], RowRule] = {}

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
            # The layer, not its weight: a packed one holds the memory that its weight is a view of.
            return row_stable_linear(x, linear.weight, rule, library)  # type: ignore[attr-defined]

        return product

    def _row_rule(self, kind: str, weight: torch.Tensor) -> RowRule:
        key = (kind, weight.dtype, tuple(weight.shape))
        if key not in self._row_rules:
            self._row_rules[key] = row_rule(
                weight.shape[0], weight.shape[1], weight.dtype, self._libraries[kind]
            )
        return self._row_rules[key]
