"""Weights in GGUF's block formats as planes in which a GPU's kernels read them, and what they expand to.

The low four bits of all weights are words of `int4_layout`; bits above them have a plane with as many elements, scales
and minima have planes [groups, N]. Weights of eight bits are words of `byte_layout`. A weight takes as many bytes as in
a file, but for Q4_K and Q5_K, whose scales and minima of six bits take eight: 2.8 and 2.3 % more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import byte_layout, int4_layout
from .block_formats import BLOCK, TILE_ROWS, BlockFormat, BlockWeight, read_scales, read_values
from .int4_layout import depth

_TILES = 64
"""Number of tiles that are reordered or expanded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlanes:
    """A weight [N, K] of one format."""

    format: BlockFormat
    words: torch.Tensor
    """int32 [N, K / 8], the low four bits of weights; of eight bits [N, K / 4]."""
    high: torch.Tensor | None
    """Bits above them, of each word: uint8 [N, K / 8] of five bits, int16 of six; else None."""
    scales: torch.Tensor
    """float16 [K / unit, N]"""
    minima: torch.Tensor | None
    """float16 [K / unit, N]; None: the format has none."""
    factors: torch.Tensor | None
    """uint8, of Q6_K int8 [sub-blocks, N]: factors of the unit's scale; None: 1."""
    min_factors: torch.Tensor | None
    """uint8 [sub-blocks, N]: factors of the unit's minimum; None: 1."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * (4 if self.format.bits == 8 else int4_layout.WORD)

    @property
    def num_bytes(self) -> int:
        planes = (self.words, self.high, self.scales, self.minima, self.factors, self.min_factors)
        return sum(plane.nbytes for plane in planes if plane is not None)


PlaneShape = tuple[tuple[int, int], torch.dtype]
_HIGH = {5: torch.uint8, 6: torch.int16}
"""Type of an element with the bits above four of the eight weights of a word, by the bits of a weight."""


def plane_shapes(format: BlockFormat, num_rows: int, num_inputs: int) -> dict[str, PlaneShape]:
    """Shape and dtype of each plane that a weight has, by the name of its field."""
    words = num_rows, num_inputs // (4 if format.bits == 8 else int4_layout.WORD)
    units = num_inputs // format.unit, num_rows
    sub_blocks = num_inputs // sub_block(format), num_rows
    shapes: dict[str, PlaneShape] = {"words": (words, torch.int32), "scales": (units, torch.float16)}
    if format.bits in _HIGH:
        shapes["high"] = words, _HIGH[format.bits]
    if format.has_min:
        shapes["minima"] = units, torch.float16
    if format.is_nested:
        shapes["factors"] = sub_blocks, torch.uint8 if format.has_min else torch.int8
        if format.has_min:
            shapes["min_factors"] = sub_blocks, torch.uint8
    return shapes


def sub_block(format: BlockFormat) -> int:
    """Number of inputs that share a scale."""
    return BLOCK if format.has_min or not format.is_nested else BLOCK // 2


def planes_of(weight: BlockWeight) -> BlockPlanes:
    """The planes of a weight, on its device."""
    format, (n, k), device = weight.format, weight.shape, weight.tiles.device
    shapes = plane_shapes(format, n, k)
    words, high = (
        torch.empty(shapes[name][0], dtype=shapes[name][1], device=device) if name in shapes else None
        for name in ("words", "high")
    )
    assert words is not None
    for begin in range(0, len(weight.tiles), _TILES):
        rows = slice(begin * TILE_ROWS, min((begin + _TILES) * TILE_ROWS, n))
        values = read_values(weight.tiles[begin : begin + _TILES], format).flatten(0, 1)[: rows.stop - rows.start]
        if format.bits == 8:
            words[rows] = byte_layout.ordered(values) if k % byte_layout.TILE == 0 else values.view(torch.int32)
        else:
            words[rows] = int4_layout.pack(values & 15)
        if high is not None:
            high[rows] = _high_words(values >> 4, format.bits - 4)
    scales = read_scales(weight.tiles, format)
    step, factors = format.unit // sub_block(format), torch.uint8 if format.has_min else torch.int8
    return BlockPlanes(
        format=format,
        words=words,
        high=high,
        # Numbers that were float16 in the file.
        scales=_plane(scales.scale[:, :, ::step], n, torch.float16),
        minima=None if scales.minimum is None else _plane(scales.minimum[:, :, ::step], n, torch.float16),
        factors=None if scales.factor is None else _plane(scales.factor, n, factors),
        min_factors=None if scales.min_factor is None else _plane(scales.min_factor, n, factors),
    )


def _plane(values: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[tiles, 16, groups] → [groups, N]"""
    return values.flatten(0, 1)[:num_rows].t().to(dtype).contiguous()


def expand(planes: BlockPlanes, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] with the bits of `block_formats.expand`: in plain torch, the specification of the kernels."""
    return expand_rows(planes, torch.arange(planes.shape[0], device=planes.words.device), dtype)


def expand_rows(planes: BlockPlanes, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, K] of the weights at row_ids, integers [T]."""
    k, num_rows = planes.shape[1], _TILES * TILE_ROWS
    out = torch.empty(len(row_ids), k, dtype=dtype, device=planes.words.device)
    for begin in range(0, len(row_ids), num_rows):
        ids = row_ids[begin : begin + num_rows].long()
        values = _values(planes, ids).float() - planes.format.offset
        scale, minimum = (_of_inputs(plane, ids, k) for plane in (planes.scales, planes.minima))
        factor, min_factor = (_of_inputs(plane, ids, k) for plane in (planes.factors, planes.min_factors))
        assert scale is not None
        values *= scale if factor is None else scale * factor
        if minimum is not None:
            values += minimum if min_factor is None else -(minimum * min_factor)
        out[begin : begin + num_rows] = values.to(dtype)
    return out


def _of_inputs(plane: torch.Tensor | None, row_ids: torch.Tensor, num_inputs: int) -> torch.Tensor | None:
    """float32 [T, K] of a plane [groups, N]."""
    if plane is None:
        return None
    return plane[:, row_ids].t().float().repeat_interleave(num_inputs // len(plane), dim=1)


def _values(planes: BlockPlanes, row_ids: torch.Tensor) -> torch.Tensor:
    """The stored numbers, uint8 [T, K]."""
    words, bits = planes.words[row_ids], planes.format.bits
    if bits == 8:
        is_ordered = planes.shape[1] % byte_layout.TILE == 0
        return byte_layout.restored(words, torch.uint8) if is_ordered else words.view(torch.uint8)
    values = int4_layout.unpack(words)
    if planes.high is not None:
        values = values | _read_high_words(planes.high[row_ids], bits - 4) << 4
    return values


def _high_words(high: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 [N, K] of one or two bits into an element for each word of `int4_layout`, [N, K / 8]: bit 4 e + p, or
    two of them from twice that on, belong to its nibble 4 e + p."""
    n, k = high.shape
    # [N, tiles, blocks, p, c, e] -> [N, words, e, p]
    of_words = high.reshape(n, -1, depth(k) // BLOCK, 4, 4, 2).permute(0, 1, 4, 2, 5, 3).reshape(n, k // 8, 2, 4)
    shifts = bits * torch.arange(4, dtype=torch.uint8, device=high.device)
    halves = (of_words << shifts).sum(3, dtype=torch.uint8)
    if bits == 1:
        return halves[..., 0] | halves[..., 1] << 4
    return halves.contiguous().view(torch.int16)[..., 0]


def _read_high_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Reads what `_high_words` made: uint8 [N, K]."""
    n, k = words.shape[0], words.shape[1] * int4_layout.WORD
    halves = torch.stack((words & 15, words >> 4), 2) if bits == 1 else words.view(torch.uint8).view(n, -1, 2)
    shifts = bits * torch.arange(4, dtype=torch.uint8, device=words.device)
    # [N, tiles, c, blocks, e, p] -> [N, tiles, blocks, p, c, e]
    of_words = (halves[..., None] >> shifts & (1 << bits) - 1).view(n, -1, 4, depth(k) // BLOCK, 2, 4)
    return of_words.permute(0, 1, 3, 5, 2, 4).reshape(n, k)
