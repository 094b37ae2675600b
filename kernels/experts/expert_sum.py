"""The sum of each token's experts: all in routing order, or in groups that ranks divide."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .combine import combine
from .combine_tree import combine_tree


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Experts of a layer that this process has, and how their outputs are added."""

    is_share: bool = False
    """Whether other ranks have experts too; pairs of these have expert −1."""
    num_leaves: int = 0
    """Equal groups of the experts, which are added in a tree; 0: outputs are added in routing
    order."""


ALL = ExpertPart()


def sum_of_experts(
    y: torch.Tensor,
    places: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    part: ExpertPart,
    *,
    biases: torch.Tensor | None,
    dependent: bool,
) -> torch.Tensor:
    """Returns the sums [T, H] of outputs y [rows, H] of experts int32 [T, k] with weights float32
    [T, k] and biases [E, H]; in y's dtype, or with leaves in float32. `places` as of `combine`."""
    shape = len(experts), y.shape[1]
    if part.num_leaves:
        out = y.new_empty(shape, dtype=torch.float32)
        tree = experts, num_experts, part.num_leaves
        combine_tree(y, weights, out, places, *tree, biases=biases, dependent=dependent)
        return out
    out = y.new_empty(shape)
    named = experts if part.is_share or biases is not None else None
    combine(y, weights, out, places, experts=named, biases=biases, dependent=dependent)
    return out
