"""Weights of four bits whose blocks of 32 inputs share a power of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch

from headwater.kernels.quant.mxfp4 import BLOCK, Mxfp4Weight, cut_inputs, expand, num_words

from ...config import ConfigError
from ...weights.grouped import MXFP4, SCALES
from .linear import Cut, ExpandableLinear, Parameter


class Mxfp4Linear(ExpandableLinear):
    """A weight is a number of e2m1 times its scale, which bfloat16 and float32 hold as it is."""

    kind = "mxfp4"
    suffixes = (MXFP4, SCALES)

    def __init__(self, weight: Mxfp4Weight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        if in_features % BLOCK:
            raise ConfigError("inputs of mxfp4 weights", in_features, f"multiples of {BLOCK}")
        words = (out_features, num_words(in_features))
        scales = (in_features // BLOCK, out_features)
        return (
            Parameter(suffix=MXFP4, shape=words, dtype=torch.int32, out_axis=0, in_axis=1),
            Parameter(suffix=SCALES, shape=scales, dtype=torch.uint8, out_axis=1, in_axis=0),
        )

    @classmethod
    def cut(
        cls,
        tensors: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        cut: Cut,
    ) -> dict[str, torch.Tensor]:
        if cut.inputs.start % BLOCK or cut.inputs.stop % BLOCK:
            raise ConfigError("inputs of a rank", len(cut.inputs), f"multiples of {BLOCK}")
        return super().cut(tensors, shape, dtype, cut)

    @classmethod
    def cut_inputs(
        cls,
        tensors: Mapping[str, torch.Tensor],
        axes: Mapping[str, int | None],
        inputs: range,
        num_inputs: int,
    ) -> dict[str, torch.Tensor]:
        scales = tensors[SCALES][inputs.start // BLOCK : inputs.stop // BLOCK]
        return {MXFP4: cut_inputs(tensors[MXFP4], inputs, num_inputs), SCALES: scales}

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(Mxfp4Weight(words=tensors[MXFP4], scales=tensors[SCALES]), dtype)

    def expanded(self) -> torch.Tensor:
        return expand(self.weight, self.dtype)

    def outputs(self, rows: range) -> Mxfp4Linear:
        own = slice(rows.start, rows.stop)
        weight = Mxfp4Weight(words=self.weight.words[own], scales=self.weight.scales[:, own])
        return Mxfp4Linear(weight, self.dtype)
