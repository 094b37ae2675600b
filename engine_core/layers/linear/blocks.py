"""Weights in GGUF's block formats, packed from the file to the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from headwater.kernels.quant import block_rows
from headwater.kernels.quant.block_formats import BlockWeight
from headwater.kernels.quant.block_linear import block_linear

from ...config import ConfigError
from ...weights.blocks import (
    BLOCKS,
    PARTS,
    Parts,
    cut_parts,
    facts_of,
    named,
    num_bytes,
    stored_parts,
)
from .linear import Cut, Parameter, StoredLinear

LookUp = Callable[[BlockWeight, torch.Tensor, torch.dtype], torch.Tensor]
"""Like `kernels.quant.block_rows.block_rows`."""


def parameters_of_parts(
    suffix: str,
    size_of: Callable[[Sequence[Sequence[int]]], int],
    out_features: int,
    in_features: int,
    stored: Mapping[str, torch.Tensor],
) -> tuple[Parameter, ...]:
    """Parameters of a weight made of several parts, whose bytes are stored under `suffix`. `stored`
    says the number of parts and their formats. Raises `ConfigError` for parts of another shape."""
    facts = facts_of(stored[PARTS])
    shape = sum(rows for _, rows, _ in facts), {inputs for _, _, inputs in facts}
    if shape != (out_features, {in_features}):
        raise ConfigError(
            "parts of block weights", facts, f"{out_features} rows of {in_features} inputs"
        )
    return (
        Parameter(
            suffix=suffix, shape=(size_of(facts),), dtype=torch.uint8, out_axis=None, in_axis=None
        ),
        Parameter(
            suffix=PARTS, shape=(len(facts), 3), dtype=torch.int32, out_axis=None, in_axis=None
        ),
    )


class BlockLinear(StoredLinear):
    """Multiplies activations that are rounded to 8 bits in blocks of 32 inputs."""

    kind = "blocks"
    suffixes = (BLOCKS, PARTS)

    def __init__(self, parts: Parts) -> None:
        """The outputs of the parts are concatenated."""
        self.parts = parts
        self.out_features = sum(part.num_rows for part in parts)
        self.in_features = parts[0].shape[1]

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        return parameters_of_parts(BLOCKS, num_bytes, out_features, in_features, stored)

    @classmethod
    def cut(
        cls,
        tensors: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        cut: Cut,
    ) -> dict[str, torch.Tensor]:
        parts = cut_parts(stored_parts(tensors[BLOCKS], tensors[PARTS]), cut.outputs, cut.inputs)
        return named(parts, "")

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(stored_parts(tensors[BLOCKS], tensors[PARTS]))

    def outputs(self, rows: range) -> BlockLinear:
        return BlockLinear(cut_parts(self.parts, (rows,), range(self.in_features)))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return block_linear(x, self.parts)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Packed embedding: rows are expanded when they are looked up."""

    weight: BlockWeight
    dtype: torch.dtype
    """Type of the rows that are looked up."""
    look_up: LookUp = block_rows.block_rows

    @property
    def device(self) -> torch.device:
        return self.weight.tiles.device

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [T] → [T, H]"""
        return self.look_up(self.weight, token_ids, self.dtype)
