"""Weights of four or eight bits in groups of inputs, in the order in which a CPU's kernels read
them. Knows no file format.

Sixteen rows make a tile. A group's scales of these rows lie before its zero points, and these
before the numbers: four inputs of each row in a 32-bit word, so that one vector holds four inputs
of all sixteen rows; of four bits, two such words share one. A tile takes little more bytes than its
rows in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .block_formats import BLOCK, TILE_ROWS

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Parameters that a kernel is compiled for."""

    bits: int
    scale_dtype: torch.dtype

    @property
    def scale_bytes(self) -> int:
        """Number of bytes of a tile's scales of one group."""
        return TILE_ROWS * self.scale_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a tile's numbers of 32 inputs."""
        return TILE_ROWS * BLOCK * self.bits // 8

    def group_bytes(self, group_size: int) -> int:
        """Number of bytes of one group of a tile."""
        return self.scale_bytes + TILE_ROWS + group_size // BLOCK * self.block_bytes


GROUP_FORMATS = tuple(GroupFormat(bits, dtype) for bits in (4, 8) for dtype in SCALE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiles:
    """A weight [N, K] that is (q - zero) * scale."""

    format: GroupFormat
    tiles: torch.Tensor
    """uint8 [ceil(N / 16), groups, bytes]; rows beyond N are zeros."""
    num_rows: int
    """Number of outputs, N."""
    group_size: int
    order: torch.Tensor | None = None
    """int64 [K]: the inputs in the order of the tiles; None: in their own."""
    rounds_tokens: bool = False
    """Whether activations are rounded with one scale for a row rather than one for 32 inputs."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.tiles.shape[1] * self.group_size


def pack(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int
) -> torch.Tensor:
    """Tiles of values uint8 [N, K], scales [groups, N] and zeros uint8 [groups, N]; groups follow
    one another."""
    num_rows = len(values)
    num_groups = len(scales)
    padding = -num_rows % TILE_ROWS
    values = torch.nn.functional.pad(values, (0, 0, 0, padding))
    # [tiles, groups, 16, bytes]
    numbers = [
        torch.nn.functional.pad(each, (0, padding))
        .view(num_groups, -1, TILE_ROWS)
        .transpose(0, 1)
        .contiguous()
        for each in (scales, zeros)
    ]
    # [tiles, 16, groups, blocks, steps, 4] -> [tiles, groups, blocks, steps, 16, 4]
    words = values.view(-1, TILE_ROWS, num_groups, values.shape[1] // num_groups // BLOCK, 8, 4)
    words = words.permute(0, 2, 3, 4, 1, 5)
    if bits == 4:
        words = words[:, :, :, 0::2] | words[:, :, :, 1::2] << 4
    return torch.cat(
        [*(number.view(torch.uint8).flatten(2) for number in numbers), words.flatten(2)], dim=2
    )


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Numbers in tiles, without the rows beyond N."""

    values: torch.Tensor
    """uint8 [N, K]"""
    scales: torch.Tensor
    """float32 [N, groups]"""
    zeros: torch.Tensor
    """uint8 [N, groups]"""


def read(weight: GroupTiles) -> GroupNumbers:
    """The numbers of tiles, inputs in the tiles' order."""
    format = weight.format
    tiles = weight.tiles
    scales, zeros, data = tiles.split(
        [format.scale_bytes, TILE_ROWS, tiles.shape[2] - format.scale_bytes - TILE_ROWS], dim=2
    )
    words = data.reshape(*tiles.shape[:2], weight.group_size // BLOCK, format.bits, TILE_ROWS, 4)
    if format.bits == 4:
        words = torch.stack((words & 15, words >> 4), dim=4).flatten(3, 4)
    values = words.permute(0, 4, 1, 2, 3, 5).reshape(-1, weight.shape[1])
    of_rows = [
        each.transpose(1, 2).flatten(0, 1)[: weight.num_rows]
        for each in (_numbers(scales, format), zeros)
    ]
    return GroupNumbers(values[: weight.num_rows], of_rows[0], of_rows[1])


def _numbers(scales: torch.Tensor, format: GroupFormat) -> torch.Tensor:
    """Converts scales to float32 [tiles, groups, 16]."""
    return scales.contiguous().view(format.scale_dtype).float()
