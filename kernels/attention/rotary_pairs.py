"""Which numbers of a head rotate with each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """Pairs of the first `width` numbers of a head; the others stay as they are. Cosines and sines
    of pair i stand at i and at i + D / 2 of a row of the table, whose other numbers are 1 and 0."""

    width: int
    """Numbers of a head that rotate, an even number."""
    interleaved: bool = False
    """Whether number 2 i rotates with 2 i + 1, else i with i + width / 2."""

    def order(self, head_dim: int) -> torch.Tensor:
        """Places [D] in a head of the first number of each pair, then of the second ones; numbers
        that stay as they are make pairs in their order."""
        assert self.width % 2 == 0
        assert 0 <= self.width <= head_dim
        rotated = torch.arange(self.width)
        pairs = rotated.view(-1, 2).T if self.interleaved else rotated.view(2, -1)
        others = torch.arange(self.width, head_dim).view(2, -1)
        return torch.cat((pairs, others), dim=1).flatten()
