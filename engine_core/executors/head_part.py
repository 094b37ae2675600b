"""Plain draws where each rank has the logits of some tokens: none of them travels, but a token and its score a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.kernels.lm_head_sample import MAX_ROWS, best_of_head
from headwater.kernels.sample import Candidates, Draws, best_of_stretches

from ..layers.dense import DenseLinear
from ..layers.linear import Linear, Product
from ..platforms.peer_group import PeerGroup


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The rows of the vocabulary head that one rank has."""

    linear: Linear
    product: Product
    first_token: int
    group: PeerGroup

    def draw(self, hidden: torch.Tensor, draws: Draws, candidates: Candidates, out: torch.Tensor) -> None:
        """Draws from hidden [R, H] as all ranks do; writes out int32 [R], the same on each."""
        if len(hidden) <= MAX_ROWS and isinstance(self.linear, DenseLinear):
            num_stretches = best_of_head(hidden, self.linear.weight, draws, candidates, self.first_token)
        else:
            num_stretches = best_of_stretches(self.product(hidden), draws, candidates, self.first_token)
        self.group.best(candidates, num_stretches, out)
