"""Weights of eight bits, integers and floating-point numbers, and what they expand to. Knows no
file format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROWS = 1024
"""Number of rows that are expanded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight [N, K]: (q - zero) * scale, with a scale and a zero point for each output and group
    of inputs."""

    values: torch.Tensor
    """uint8 [N, K]"""
    scales: torch.Tensor
    """float16, bfloat16 or float32 [groups, N]"""
    zeros: torch.Tensor
    """uint8 [groups, N]"""
    groups: torch.Tensor | None = None
    """int32 [K]: the group of each input; None: groups follow one another, all of one size."""
    rounds_tokens: bool = False
    """Whether it is made for activations of which every token is rounded to 8 bits with one
    scale."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def group_size(self) -> int:
        return self.shape[1] // len(self.scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight [N, K]: a number times the scale of its output and group of inputs; groups are of
    one size."""

    values: torch.Tensor
    """float8_e4m3fn [N, K]"""
    scales: torch.Tensor
    """float32 [groups, N]"""
    rounds_tokens: bool = False
    """Whether activations are rounded to eight bits, as in `Int8Weight`."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]


ByteWeight = Int8Weight | Fp8Weight


def expand(weight: ByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each computed in float32 and rounded to the dtype once: in plain torch,
    the specification of all kernels."""
    n, k = weight.shape
    device = weight.values.device
    num_groups = len(weight.scales)
    order = weight.groups if isinstance(weight, Int8Weight) else None
    of_inputs = (
        torch.arange(k, device=device) // (k // num_groups) if order is None else order.long()
    )
    out = torch.empty(n, k, dtype=dtype, device=device)
    for begin in range(0, n, _ROWS):
        rows = slice(begin, begin + _ROWS)
        values = weight.values[rows].float()
        if isinstance(weight, Int8Weight):
            values -= weight.zeros[:, rows].t().float()[:, of_inputs]
        out[rows] = (values * weight.scales[:, rows].t().float()[:, of_inputs]).to(dtype)
    return out
