"""Mixtures of experts on a CPU: routes, and products with the experts that tokens chose.

A token's bits do not depend on the others of its batch: the products with an expert's weights are
those of linear layers, whose rows do not, and everything else is computed row by row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.kernels.cpu import fp8_tiles as fp8_units
from headwater.kernels.cpu import group_tiles as int_units
from headwater.kernels.cpu.compiler.compiled import Kernel
from headwater.kernels.cpu.experts import route as route_kernel
from headwater.kernels.cpu.experts.expert_product import ExpertProduct, ExpertTiles
from headwater.kernels.cpu.experts.expert_product import kernel_of as kernel_of_tiles
from headwater.kernels.cpu.experts.expert_rows import (
    ADD_BIASES,
    COMBINE,
    COUNT,
    GATHER,
    SORT,
    RowsByExpert,
    add_biases,
    combine,
    combine_in_tree,
    count_rows,
    rows_of_tokens,
    sort_by_expert,
)
from headwater.kernels.cpu.experts.gates import GATES
from headwater.kernels.quant.block_formats import BLOCK, TILE_ROWS

from ..layers.linear.blocks import BlockLinear
from ..layers.linear.fp8_tiles import Fp8TileLinear
from ..layers.linear.group_tiles import TileLinear
from ..layers.linear.linear import Linear, Product
from ..layers.routing import ELSEWHERE, ExpertStack, Router, Routes, Scoring

MakeProduct = Callable[[Linear], Product]
StackProduct = Callable[[torch.Tensor, RowsByExpert], torch.Tensor]
"""Rows [P, K] by place, times the weights of their experts: [P, N]."""
KERNELS = (route_kernel.KERNEL, COUNT, SORT, GATHER, ADD_BIASES, COMBINE)
"""Kernels that every model with experts needs."""


def route(logits: torch.Tensor, router: Router) -> Routes:
    """See `ExpertPlatform.route`."""
    found, weights = route_kernel.route(
        logits,
        router.num_chosen,
        is_sigmoid=router.scoring is Scoring.SIGMOID,
        is_normalized=router.is_normalized,
        scale=router.scale,
        bias=router.bias,
        correction=router.correction,
        num_groups=router.num_groups,
        num_chosen_groups=router.num_chosen_groups,
        num_group_scores=router.num_group_scores,
    )
    if router.counts is not None:
        count_rows(found, router.counts)
    return Routes(found if router.own is None else _own_of(found, router.own), weights)


def _own_of(experts: torch.Tensor, own: range) -> torch.Tensor:
    """Numbers of this rank's experts, of those of all ranks."""
    is_own = (experts >= own.start) & (experts < own.stop)
    return torch.where(is_own, experts - own.start, ELSEWHERE)


class CpuExperts:
    """See `ExpertPlatform.experts`."""

    def __init__(
        self, gate_up: ExpertStack, down: ExpertStack, activation: str, product: MakeProduct
    ) -> None:
        """`product`: makes the product of one expert's linear layer."""
        self._gate = GATES[activation]
        self._num_experts = gate_up.num_experts
        self._gate_up = _product_of(gate_up, product)
        self._down = _product_of(down, product)
        self._biases = gate_up.bias, down.bias
        self._is_share = down.is_share
        self._num_leaves = down.num_leaves

    def __call__(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        rows = sort_by_expert(routes.experts, self._num_experts)
        if self._is_share:
            rows = rows.of_experts_here()
        return self._sum(self._outs(x, routes, rows), routes, rows)

    def _outs(self, x: torch.Tensor, routes: Routes, rows: RowsByExpert) -> torch.Tensor:
        """Rows [P, H] by place."""
        if not len(rows.tokens):
            return x[:0]
        inner = self._gate_up(rows_of_tokens(x, rows), rows)
        _add_biases(inner, rows, routes, self._biases[0])
        outs = self._down(self._gate(inner), rows)
        _add_biases(outs, rows, routes, self._biases[1])
        return outs

    def _sum(self, outs: torch.Tensor, routes: Routes, rows: RowsByExpert) -> torch.Tensor:
        if not self._num_leaves:
            return combine(outs, rows, routes.weights)
        return combine_in_tree(outs, rows, routes.experts, routes.weights, self._num_leaves)


def _add_biases(
    outs: torch.Tensor, rows: RowsByExpert, routes: Routes, biases: torch.Tensor | None
) -> None:
    if biases is not None:
        add_biases(outs, rows, routes.experts, biases)


def kernels_of(stacks: list[ExpertStack]) -> list[Kernel]:
    """Kernels for the packed weights of these."""
    tiles = [tiles_of(stack) for stack in stacks]
    return [
        kernel_of_tiles(each.format, rounds_tokens=each.rounds_tokens)
        for each in tiles
        if each is not None
    ]


def _product_of(stack: ExpertStack, product: MakeProduct) -> StackProduct:
    tiles = tiles_of(stack)
    return _OneByOne(stack, product) if tiles is None else ExpertProduct(tiles)


class _OneByOne:
    """Computes one expert after another, each with all of its rows."""

    def __init__(self, stack: ExpertStack, product: MakeProduct) -> None:
        self._stack = stack
        self._make_product = product
        self._products: dict[int, Product] = {}

    def __call__(self, x: torch.Tensor, rows: RowsByExpert) -> torch.Tensor:
        out = x.new_empty(len(x), self._stack.out_features)
        starts = rows.starts.tolist()
        for expert in rows.chosen.tolist():
            if expert >= 0:
                own = slice(starts[expert], starts[expert + 1])
                out[own] = self._product(expert)(x[own])
        return out

    def _product(self, expert: int) -> Product:
        """Made when a token first chooses the expert."""
        if expert not in self._products:
            self._products[expert] = self._make_product(self._stack.expert(expert))
        return self._products[expert]


def tiles_of(stack: ExpertStack) -> ExpertTiles | None:
    """Weights arranged in tiles of one format, one expert after another; None: they are stored in
    another form."""
    linear = stack.linear
    sizes = stack.num_experts, stack.out_features, stack.in_features
    if stack.out_features % TILE_ROWS:
        return None
    if isinstance(linear, BlockLinear) and len(linear.parts) == 1:
        [part] = linear.parts
        return ExpertTiles(part.format, part.tiles, part.tiles.shape[1], *sizes)
    if isinstance(linear, TileLinear) and linear.tiles.order is None:
        own = linear.tiles
        units = int_units.units_of(own.tiles.shape[1], own.group_size // BLOCK)
        return ExpertTiles(own.format, own.tiles, units, *sizes, own.rounds_tokens)
    if isinstance(linear, Fp8TileLinear):
        fp8 = linear.tiles
        units = fp8_units.units_of(fp8.tiles.shape[1], fp8.group_size // BLOCK)
        return ExpertTiles(fp8.format, fp8.tiles, units, *sizes)
    return None
