"""Weights as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from .linear import Parameter, StoredLinear


class DenseLinear(StoredLinear):
    """One matrix in the model's dtype."""

    kind = "dense"
    suffixes = ("",)

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [N, K]"""
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        return (
            Parameter(
                suffix="", shape=(out_features, in_features), dtype=dtype, out_axis=0, in_axis=1
            ),
        )

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(tensors[""])

    def outputs(self, rows: range) -> DenseLinear:
        return DenseLinear(self.weight[rows.start : rows.stop])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)
