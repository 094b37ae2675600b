"""Layers of which a tensor-parallel rank has a part: their results are those of the whole layer, on
every rank.

A model is composed of them as of whole layers. Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from ..weights.layout import Layout, Split
from ..weights.shards import Shard
from .embedding import Embedding
from .linear.kinds import Weights
from .linear.linear import Linear
from .platform import Platform
from .process_group import Group
from .staged import AbsentLinear


class SummedLinear(Linear):
    """A part of the inputs: the ranks' products are added."""

    kind = "summed"

    def __init__(self, platform: Platform, part: Linear, group: Group) -> None:
        self.part = part
        self._group = group
        self.out_features = part.out_features
        self.in_features = part.in_features
        self._product = platform.linear(part)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K / ranks] → [T, N]"""
        return self._group.sum(self._product(x))


class JoinedLinear(Linear):
    """A part of the outputs: the ranks' products stand side by side."""

    kind = "joined"

    def __init__(
        self, platform: Platform, part: Linear, out_features: int, num_outputs: int, group: Group
    ) -> None:
        """`num_outputs`: those of a rank, where the last rank may have fewer; `out_features` of all
        ranks."""
        self.part = part
        self._group = group
        self.out_features = out_features
        self.in_features = part.in_features
        self._num_missing = num_outputs - part.out_features
        self._product = platform.linear(part)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N]"""
        joined = self._group.join(pad(self._product(x), (0, self._num_missing)))
        # Row-major as on one rank, so that kernels read and add in the same order.
        return joined[:, : self.out_features].contiguous()


class ShardedEmbedding(Embedding):
    """Rows of some tokens: the rank that has a token's row gives it to the others."""

    def __init__(self, part: Embedding, token_ids: range, group: Group) -> None:
        self._part = part
        self._token_ids = token_ids
        self._group = group
        self.dtype = part.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self._token_ids.start
        is_own = (local >= 0) & (local < len(self._token_ids))
        rows = self._part(local.clamp(0, len(self._token_ids) - 1))
        return self._group.sum(rows.masked_fill(~is_own[:, None], 0))


def over_group(
    weights: Weights,
    layout: Layout,
    platform: Platform,
    shard: Shard,
    group: Group,
    *,
    joins_vocabulary: bool = True,
    sums_products: bool = True,
) -> Weights:
    """A shard's weights as a model reads whole ones. `layout` is the whole model's. Unless the
    vocabulary is joined, a rank's logits are those of its own tokens; unless products are summed,
    the platform sums their parts."""
    linears = dict(weights.linears)
    for name, part in weights.linears.items() if shard.size > 1 else ():
        spec = layout[name]
        if isinstance(part, AbsentLinear):
            continue
        if spec.split is Split.INPUTS and sums_products:
            linears[name] = SummedLinear(platform, part, group)
        elif spec.split is Split.VOCABULARY and joins_vocabulary:
            num_outputs = len(Shard(0, shard.size).vocabulary(spec.shape[0]))
            linears[name] = JoinedLinear(platform, part, spec.shape[0], num_outputs, group)
    return replace(weights, linears=linears, group=group)
