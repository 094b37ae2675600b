"""Weights of a platform that multiplies leaves of the inputs in one launch, with `numerics` tree:
see `leaves`.

A weight stays one matrix in the model's dtype. Where its outputs are divided, it is a dense one:
products of the platform have the same bits for any number of outputs. Where its inputs are divided,
its leaves are parts of every row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.kernels.gemm.tree_sum import tree_sum

from ..config import ConfigError
from ..weights.layout import Layout, Split
from ..weights.shards import NUM_LEAVES, Shard
from .linear.dense import DenseLinear
from .linear.kinds import Weights
from .linear.linear import ExpandableLinear, Linear, Product
from .process_group import Group
from .routing import ExpertStack
from .staged import AbsentLinear


class LeafLinear(Linear):
    """Equal leaves of the inputs, some of them or all. Their products are added in float32 in a
    tree."""

    kind = "leaves"

    def __init__(self, weight: torch.Tensor, num_leaves: int) -> None:
        """weight [N, K]"""
        self.weight = weight
        self.num_leaves = num_leaves
        self.out_features, self.in_features = weight.shape

    @property
    def is_whole(self) -> bool:
        """Whether the product is rounded to the tokens' dtype; that of some of the leaves is a part
        in float32."""
        return self.num_leaves == NUM_LEAVES

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N], in x's dtype or, of some of the leaves, in float32."""
        leaves = zip(
            x.float().chunk(self.num_leaves, 1),
            self.weight.float().chunk(self.num_leaves, 1),
            strict=True,
        )
        total = tree_sum(
            [torch.nn.functional.linear(some, those.contiguous()) for some, those in leaves]
        )
        return total.to(x.dtype) if self.is_whole else total


class SummedLeafLinear(Linear):
    """A product of which this rank has some leaves: the ranks' partial sums are added in the order
    of the tree."""

    kind = "summed leaf matrix"

    def __init__(self, part: LeafLinear, product: Product, group: Group) -> None:
        """`product`: the platform's, of the part."""
        self._product = product
        self._group = group
        self.out_features = part.out_features
        self.in_features = part.in_features

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K / ranks] → [T, N]"""
        return self._group.tree_sum(self._product(x), x.dtype)


def keep_leaves(weights: Weights, layout: Layout, shard: Shard) -> Weights:
    """A rank's weights, as `leaves.cut_leaves` takes them. Raises `ConfigError` where a weight has
    no leaves."""
    linears: dict[str, Linear] = {}
    for name, linear in weights.linears.items():
        if isinstance(linear, AbsentLinear):
            linears[name] = linear
        elif layout[name].split is Split.INPUTS:
            check_leaves(name, layout[name].shape[1])
            linears[name] = LeafLinear(matrix_of(linear).contiguous(), NUM_LEAVES // shard.size)
        else:
            linears[name] = (
                DenseLinear(linear.expanded()) if isinstance(linear, ExpandableLinear) else linear
            )
    return replace(weights, linears=linears, experts=experts_in_leaves(weights, shard))


def experts_in_leaves(weights: Weights, shard: Shard) -> dict[str, ExpertStack]:
    """A rank's experts, expanded, each leaf an equal share of all experts."""
    found = {}
    for name, stack in weights.experts.items():
        matrix = matrix_of(stack.linear)
        found[name] = replace(
            stack,
            linear=DenseLinear(matrix),
            expert_bytes=matrix.nbytes // stack.num_experts,
            num_leaves=NUM_LEAVES // shard.size,
        )
    return found


def matrix_of(linear: Linear) -> torch.Tensor:
    """The weights [N, K] of a linear layer in the model's dtype."""
    if isinstance(linear, ExpandableLinear):
        return linear.expanded()
    assert isinstance(linear, DenseLinear)
    return linear.weight


def check_leaves(name: str, size: int) -> None:
    """Raises `ConfigError` where the inputs or outputs of a weight have no equal leaves."""
    if size % NUM_LEAVES:
        raise ConfigError(
            "numerics", "tree", f"default for {name}, whose {size} are no multiple of {NUM_LEAVES}"
        )
