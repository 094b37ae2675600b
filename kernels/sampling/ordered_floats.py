"""Numbers float32 as whole numbers in the same order. A negative zero comes before zero."""

from __future__ import annotations

import torch

SIGN = 0x7FFFFFFF
"""All bits except the sign."""


def ordered(x: torch.Tensor) -> torch.Tensor:
    """x float32 as int64, 32 bits of them."""
    bits = x.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & SIGN)).long()


def float_of(whole: torch.Tensor) -> torch.Tensor:
    """The float32 that `ordered` has made a whole number of."""
    words = whole.int()
    return (words ^ ((words >> 31) & SIGN)).view(torch.float32)
