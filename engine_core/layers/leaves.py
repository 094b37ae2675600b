"""Products of fixed leaves, whatever number of tensor-parallel ranks there is: `numerics` tree.

Every weight that ranks divide is eight matrices. Where its inputs are divided, the leaves' products
are added in float32 in a tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and rounded once; a rank
has a whole part of the tree. Where its outputs are divided, they stand side by side. A leaf has the
same shape on any number of ranks, so it has the same bits. Packed weights are expanded.
`leaf_matrix` is for platforms that need no such cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from headwater.kernels.gemm.tree_sum import tree_sum

from ..config import ConfigError
from ..weights.layout import Layout, Split, WeightSpec
from ..weights.shards import NUM_LEAVES, Shard
from .leaf_matrix import (
    LeafLinear,
    SummedLeafLinear,
    check_leaves,
    experts_in_leaves,
    matrix_of,
)
from .linear.dense import DenseLinear
from .linear.kinds import Weights
from .linear.linear import Linear, Product
from .platform import Platform
from .process_group import Group
from .staged import AbsentLinear

WithLeaves = Callable[[Weights, Layout, Shard], Weights]
"""Type of `cut_leaves` and of functions that build a rank's weights in another form."""


class SummedLeaves(Linear):
    """Leaves along the inputs: their products are summed on this rank, then over the ranks, in the
    order of the tree."""

    kind = "summed leaves"

    def __init__(self, leaves: Sequence[Linear], products: Sequence[Product], group: Group) -> None:
        self._products = products
        self._group = group
        self.out_features = leaves[0].out_features
        self.in_features = sum(leaf.in_features for leaf in leaves)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K / ranks] → [T, N]"""
        pieces = x.float().chunk(len(self._products), dim=1)
        own = tree_sum(
            [
                product(piece.contiguous())
                for product, piece in zip(self._products, pieces, strict=True)
            ]
        )
        return self._group.tree_sum(own, x.dtype)


class JoinedLeaves(Linear):
    """Leaves along the outputs that this rank holds. A weight that was joined from several
    sub-matrices has a leaf of each."""

    kind = "joined leaves"

    def __init__(
        self,
        leaves: Sequence[Linear],
        products: Sequence[Product],
        num_parts: Sequence[int],
        copied: frozenset[int] = frozenset(),
    ) -> None:
        """`num_parts`: number of outputs of each joined sub-matrix in a leaf; empty: a leaf has one
        sub-matrix. Sub-matrices in `copied` are whole in the last leaf, and absent from the
        others."""
        self._products = products
        self._copied = [i in copied for i in range(len(num_parts))]
        self._num_parts = list(num_parts)
        self.out_features = sum(leaf.out_features for leaf in leaves)
        self.in_features = leaves[0].in_features

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]"""
        made = [product(x) for product in self._products]
        if not self._num_parts:
            return torch.cat(made, dim=1)
        copied = self._pieces(made.pop(), of_copied=True) if True in self._copied else iter(())
        divided = zip(*(self._pieces(each, of_copied=False) for each in made), strict=True)
        parts = [(next(copied),) if is_copied else next(divided) for is_copied in self._copied]
        return torch.cat([piece for part in parts for piece in part], dim=1)

    def _pieces(self, made: torch.Tensor, *, of_copied: bool) -> Iterator[torch.Tensor]:
        """Splits a leaf's outputs into those of its sub-matrices."""
        sizes = zip(self._num_parts, self._copied, strict=True)
        own = [size for size, is_copied in sizes if is_copied == of_copied]
        return iter(torch.split(made, own, dim=1))


def cut_leaves(weights: Weights, layout: Layout, shard: Shard) -> Weights:
    """A rank's weights, with each weight that ranks divide cut into its leaves, which have names of
    their own. `layout`: of the whole model. Raises `ConfigError` where a weight cannot be cut into
    leaves."""
    linears: dict[str, Linear] = {}
    for name, linear in weights.linears.items():
        if layout[name].split is Split.NONE or isinstance(linear, AbsentLinear):
            linears[name] = linear
            continue
        for i, leaf in enumerate(_leaves(name, matrix_of(linear), layout[name], shard)):
            linears[_leaf_name(name, i)] = DenseLinear(leaf)
    return replace(weights, linears=linears, experts=experts_in_leaves(weights, shard))


def of_leaves(weights: Weights, layout: Layout, platform: Platform, group: Group) -> Weights:
    """The weights as the model reads them, over leaves that the platform has prepared."""
    linears: dict[str, Linear] = {}
    for name, spec in layout.items():
        if not spec.is_linear or spec.num_experts:
            continue
        if name in weights.linears:
            linears[name] = _summed(weights.linears[name], platform, group)
            continue
        leaves: list[Linear] = []
        while (leaf := weights.linears.get(_leaf_name(name, len(leaves)))) is not None:
            leaves.append(leaf)
        products = [platform.linear(each) for each in leaves]
        if spec.split is Split.INPUTS:
            linears[name] = SummedLeaves(leaves, products, group)
        else:
            linears[name] = JoinedLeaves(leaves, products, _leaf_parts(spec), spec.copied)
    return replace(weights, linears=linears)


def _summed(linear: Linear, platform: Platform, group: Group) -> Linear:
    if isinstance(linear, LeafLinear) and not linear.is_whole:
        return SummedLeafLinear(linear, platform.linear(linear), group)
    return linear


def _leaf_name(name: str, leaf: int) -> str:
    return f"{name}.leaf{leaf}"


def _leaves(name: str, weight: torch.Tensor, spec: WeightSpec, shard: Shard) -> list[torch.Tensor]:
    """The leaves of this rank's part of a weight."""
    num_own = NUM_LEAVES // shard.size
    if spec.split is Split.INPUTS:
        check_leaves(name, spec.shape[1])
        # The product of a leaf is not rounded before it is added.
        return [leaf.contiguous() for leaf in weight.float().chunk(num_own, dim=1)]
    if spec.split is Split.VOCABULARY:
        ids = [Shard(i, NUM_LEAVES).vocabulary(spec.shape[0]) for i in range(NUM_LEAVES)]
        own = shard.vocabulary(spec.shape[0])
        own_ids = [
            each for each in ids if each and each.start >= own.start and each.stop <= own.stop
        ]
        if sum(map(len, own_ids)) != len(own):
            raise ConfigError(
                "numerics",
                "tree",
                f"default for a vocabulary of {spec.shape[0]} on {shard.size} ranks",
            )
        return [weight[each.start - own.start : each.stop - own.start] for each in own_ids]
    sizes = [size if i in spec.copied else size // shard.size for i, size in enumerate(spec.pieces)]
    parts = torch.split(weight, sizes)
    divided = []
    for i, size in enumerate(spec.pieces):
        if i not in spec.copied:
            check_leaves(name, size)
            divided.append(parts[i].chunk(num_own))
    leaves = [torch.cat(pieces) for pieces in zip(*divided, strict=True)]
    copied = [parts[i] for i in sorted(spec.copied)]
    return [*leaves, torch.cat(copied)] if copied else leaves


def _leaf_parts(spec: WeightSpec) -> list[int]:
    """Number of outputs of each joined sub-matrix in a leaf."""
    return [size if i in spec.copied else size // NUM_LEAVES for i, size in enumerate(spec.pieces)]
