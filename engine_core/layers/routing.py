"""Terms of a mixture of experts: how a router chooses, the experts that it chose, and the weights
of all experts of a layer. Platforms compute by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from .linear.dense import DenseLinear
from .linear.linear import Linear


class Scoring(Enum):
    """Scores of a router's logits, in float32."""

    SOFTMAX = "softmax over all experts"
    SIGMOID = "sigmoid of each logit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """Chooses the experts of each token. An expert with a larger score comes first, of equal ones
    the one with the smaller index. Source of the groups and the correction: DeepSeek-AI,
    "DeepSeek-V3 technical report", 2024.

    Chosen by score + correction; weighted by the score alone. With groups, an equal share of
    neighbouring experts each, a group counts as the sum of its largest corrected scores, and only
    experts of the first `num_chosen_groups` are chosen from.
    """

    num_chosen: int
    """Experts a token, k."""
    scoring: Scoring = Scoring.SOFTMAX
    is_normalized: bool = False
    """Whether the scores of a token's chosen experts are divided by their sum, which is added in
    routing order."""
    scale: float = 1.0
    """Factor of the weights, after the division."""
    bias: torch.Tensor | None = None
    """[E] of the logits' type or float32, added to the logits in float32."""
    correction: torch.Tensor | None = None
    """float32 [E], added to the scores that experts are chosen by."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2
    """Largest scores of a group that it counts as the sum of, 1 or 2."""
    own: range | None = None
    """Experts of this rank, which its routes number from 0; all others are `ELSEWHERE`. None: the
    rank has all experts."""
    counts: torch.Tensor | None = None
    """int64 [E], to which the rows of each expert are added, those of other ranks too; None: rows
    are not counted."""


ELSEWHERE = -1
"""Index of an expert that another rank has."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Experts of T tokens in routing order: the first chosen one first."""

    experts: torch.Tensor
    """int32 [T, k], or `ELSEWHERE`"""
    weights: torch.Tensor
    """float32 [T, k]"""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """One weight of all experts of a layer: E matrices [N, K], which are one linear layer of E · N
    outputs in the order of the experts."""

    linear: Linear
    """[E · N, K], of any kind."""
    num_experts: int
    bias: torch.Tensor | None = None
    """[E, N], added to the product with an expert; None: there is none."""
    is_share: bool = False
    """Whether other ranks have more experts, which routes name `ELSEWHERE`."""
    expert_bytes: int = 0
    """Bytes of one stored expert."""
    num_leaves: int = 0
    """Equal groups of the experts, in their order: a token's experts of a group are added, and the
    groups in a tree. 0: all are added in routing order."""

    @property
    def kind(self) -> str:
        """Kind of the expert weights, by which platforms choose a product."""
        return self.linear.kind

    @property
    def out_features(self) -> int:
        """N, of one expert."""
        return self.linear.out_features // self.num_experts

    @property
    def in_features(self) -> int:
        """K"""
        return self.linear.in_features

    def expert(self, index: int) -> Linear:
        """The weight [N, K] of one expert, in the same memory."""
        first = index * self.out_features
        return self.linear.outputs(range(first, first + self.out_features))

    @property
    def weight(self) -> torch.Tensor:
        """[E, N, K], a view; of the kind `dense` alone."""
        assert isinstance(self.linear, DenseLinear)
        return self.linear.weight.view(self.num_experts, self.out_features, self.in_features)


@dataclass(frozen=True, slots=True, eq=False)
class SharedLinears:
    """Linear layers of an expert that every token has."""

    gate_up: Linear
    """[2 I, H], gates first."""
    down: Linear
    """[H, I]"""
    gate: Linear | None
    """[1, H], whose product's sigmoid is the expert's share; None: it is added as it is."""


ExpertProduct = Callable[[torch.Tensor, Routes], torch.Tensor]
"""x [T, H] and its routes → [T, H]: the sum of each token's experts, each times its weight, added
in float32 in routing order and rounded to x's dtype once. Pairs of `ELSEWHERE` count for nothing.
With leaves, their sums are added as `kernels.gemm.tree_sum` does, and the result is float32."""
NormedRoutes = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Routes] | None]
"""x [T, H] and residual [T, H] → the norm of residual += x, in place, and its routes; None: another
launch norms so many tokens, and nothing was added."""
