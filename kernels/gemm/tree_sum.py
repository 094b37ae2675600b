"""The order in which terms of a product are added where ranks may have any share of them: a binary
tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds neighbours until one is left: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Their number is
    a power of two."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
