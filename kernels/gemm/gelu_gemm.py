"""gelu(x @ weight.T + bias), by the error function: in one launch for many rows on Hopper, where the
product is never in memory, and in two elsewhere. Both round the product as if it were stored, so
that a row has the same bits in any batch.
"""

from __future__ import annotations

import torch

from ..attention import hopper_attention
from ..launch.device import num_multiprocessors
from .add_bias import add_bias
from .gemm import linear
from .hopper_wide_gemm import hopper_wide_gemm
from .wide_gemm import is_aligned
from .wide_tiles import TEAM_TILES

MIN_ROWS = 2048
"""Least number of rows for one launch: below, its tiles leave multiprocessors idle."""


def gelu_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    dependent: bool = False,
    is_own: bool = False,
) -> torch.Tensor:
    """x [M, K], weight [N, K] and bias [N] → [M, N] in x's dtype. `dependent` and `is_own` as in
    `linear`."""
    if serves_at_once(x, weight):
        out = x.new_empty(x.shape[0], weight.shape[0])
        gelu_gemm(x, weight, bias, out)
        return out
    out = linear(x, weight, dependent=dependent, is_own=is_own)
    add_bias(out, bias, has_gelu=True, dependent=dependent)
    return out


def serves_at_once(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gelu_gemm` makes the product of these faster."""
    return (
        x.shape[0] >= MIN_ROWS
        and x.element_size() == 2
        and is_aligned(x)
        and is_aligned(weight)
        and weight.shape[0] % 8 == 0
        and hopper_attention.is_hopper(x.device)
    )


def gelu_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the result to out [M, N] in one launch."""
    hopper_wide_gemm(
        x, weight, out, TEAM_TILES[0], num_programs=num_multiprocessors(x.device), gelu_bias=bias
    )
