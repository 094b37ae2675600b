"""Packed weights as the products of few bits on Hopper read them, and rows of experts beside them.
Knows nothing about multiplying."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quant.mxfp4 import BLOCK as MXFP4_BLOCK

TILE_WORDS = 16
"""Words of an output in a tile: four of each of four blocks."""
ALIGNMENT = 16
"""Number of outputs by which they divide: the copy engine reads zero points of a group from a
multiple of 16 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWords:
    """A weight [N, K] as the kernel reads it."""

    words: torch.Tensor
    """int32 [N, K / weights of a word]"""
    scales: torch.Tensor
    """float16, bfloat16 or float32 [groups, N]; of four bits, not float32. Or uint8 [K / 32, N]
    of e8m0: then words are those of `mxfp4`, with the inputs filled up to whole tiles."""
    zeros: torch.Tensor | None
    """uint8 [groups, N]; None: numbers of four bits have 8, those of eight are e4m3."""
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    @property
    def is_float4(self) -> bool:
        """Whether numbers of four bits are e2m1."""
        return self.scales.dtype == torch.uint8

    @property
    def num_inputs(self) -> int:
        """K, without what fills tiles up."""
        return MXFP4_BLOCK * len(self.scales) if self.is_float4 else self.shape[1]

    @property
    def is_whole(self) -> bool:
        """Whether it is whole in tiles of the kernel, see `fits`."""
        return fits(self.shape, self.shape[1] // self.group_size, self.bits)

    @property
    def group_size(self) -> int:
        return MXFP4_BLOCK if self.is_float4 else self.shape[1] // len(self.scales)


@dataclass(frozen=True, slots=True)
class RowsOfExperts:
    """Rows of x by the experts that they are multiplied with, cut into tiles of one expert."""

    num_experts: int
    tiles: torch.Tensor
    """int32 [3, tiles]: expert, first row and number of rows of each. Or int32 [1, k]: the experts
    of one token, each with a row of its own; x has these rows, or the token's alone. The row of
    expert −1 is not written."""
    num_tiles: torch.Tensor | None
    """int32 [1], of those that have rows; None: tiles are those of one token."""
    is_known: bool = False
    """Whether tiles were written by a kernel before the previous one, so that weights are copied
    while that one ends."""

    @property
    def most_tiles(self) -> int:
        return self.tiles.shape[1]


def fits(shape: tuple[int, int], num_groups: int, bits: int) -> bool:
    """Whether a weight [N, K] with groups of inputs that follow one another is whole in tiles of
    the kernel."""
    n, k = shape
    tile = TILE_WORDS * 32 // bits
    size = k // num_groups
    return (
        n % ALIGNMENT == 0
        and k % tile == 0
        and (size % tile == 0 or (size >= 32 and tile % size == 0))
    )
