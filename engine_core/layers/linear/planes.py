"""Weights in GGUF's block formats as a GPU's kernels read them. They are made when a model is
loaded, from the blocks of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from headwater.kernels.quant.block_planes import BlockPlanes, expand, expand_rows

from ...weights.blocks import PARTS
from ...weights.planes import PLANES, num_bytes, stored_planes
from .blocks import parameters_of_parts
from .linear import ExpandableLinear, Parameter

LookUp = Callable[[BlockPlanes, torch.Tensor, torch.dtype], torch.Tensor]
"""Expands rows of a table: see `kernels.quant.block_planes.expand_rows`."""


class PlanesLinear(ExpandableLinear):
    """Weights as planes of bits, expanded to the model's dtype: results equal those of a dense
    layer with these weights."""

    kind = "planes"
    suffixes = (PLANES, PARTS)

    def __init__(self, parts: tuple[BlockPlanes, ...], dtype: torch.dtype) -> None:
        """The outputs of the parts are concatenated."""
        self.parts = parts
        self.dtype = dtype
        self.out_features = sum(part.shape[0] for part in parts)
        self.in_features = parts[0].shape[1]

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        return parameters_of_parts(PLANES, num_bytes, out_features, in_features, stored)

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(stored_planes(tensors[PLANES], tensors[PARTS]), dtype)

    def expanded(self) -> torch.Tensor:
        return torch.cat([expand(part, self.dtype) for part in self.parts])


@dataclass(frozen=True, slots=True)
class PlanesTable:
    """Packed embedding: rows are expanded when they are looked up."""

    weight: BlockPlanes
    dtype: torch.dtype
    """Type of the rows that are looked up."""
    look_up: LookUp = expand_rows

    @property
    def device(self) -> torch.device:
        return self.weight.words.device

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [T] → [T, H]"""
        return self.look_up(self.weight, token_ids, self.dtype)
