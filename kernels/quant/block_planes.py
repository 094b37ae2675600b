"""Weights in GGUF's block formats as planes in which a GPU's kernels read them, and what they
expand to.

The low four bits of all weights are words of `int4_layout`; weights of eight bits are words of
`byte_layout`. Bits above them, scales and factors have planes of their own, in which 64 outputs
make a block: what a program reads for a tile of inputs lies together. A weight takes as many bytes
as in a file, but for Q4_K and Q5_K, whose scales and minima of six bits take eight: 2.8 and 2.3 %
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import byte_layout, int4_layout
from .block_formats import (
    BLOCK,
    TILE_ROWS,
    BlockFormat,
    BlockWeight,
    Scales,
    read_scales,
    read_values,
)
from .int4_layout import depth

OUTPUTS = 64
"""Number of outputs in a block. The last block is filled up with zeros."""
_TILES = 64
"""Number of tiles that are reordered or expanded at a time: whole blocks."""
_HIGH = {128: torch.int32, 64: torch.int16, 32: torch.uint8}
"""Integer type that holds one bit for each weight that a thread reads, by the number of inputs of a
tile."""
PlaneShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlanes:
    """A weight [N, K] of one format."""

    format: BlockFormat
    words: torch.Tensor
    """int32 [N, K / 8], the low four bits of weights; of eight bits [N, K / 4]."""
    high: torch.Tensor | None
    """[bits above four, blocks of outputs, tiles, 64, 4], see `int4_layout`: of words c of the
    blocks of inputs i of a tile, bit 4 i + p, or twice the size of a tile / 8 on for e = 1, belongs
    to nibble 4 e + p. None: there are none."""
    scales: torch.Tensor
    """float16 [blocks of outputs, K / unit, 1 or 2, 64]: scales, and minima where the format has
    them."""
    factors: torch.Tensor | None
    """uint8, of Q6_K int8 [blocks of outputs, K / 32, 2, 64]: factors of the scale and of the
    minimum of 32 inputs, in Q6_K of the scales of 16 inputs each. None: 1."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * (
            4 if self.format.bits == 8 else int4_layout.WORD
        )

    @property
    def num_bytes(self) -> int:
        return sum(
            plane.nbytes
            for plane in (self.words, self.high, self.scales, self.factors)
            if plane is not None
        )


def plane_shapes(format: BlockFormat, num_rows: int, num_inputs: int) -> dict[str, PlaneShape]:
    """Shape and dtype of each plane that a weight has, by the name of its field."""
    words = num_rows, num_inputs // (4 if format.bits == 8 else int4_layout.WORD)
    num_blocks = -(-num_rows // OUTPUTS)
    tile = depth(num_inputs)
    scales = num_blocks, num_inputs // format.unit, 2 if format.has_min else 1, OUTPUTS
    shapes: dict[str, PlaneShape] = {
        "words": (words, torch.int32),
        "scales": (scales, torch.float16),
    }
    if format.bits in (5, 6):
        shapes["high"] = (format.bits - 4, num_blocks, num_inputs // tile, OUTPUTS, 4), _HIGH[tile]
    if format.is_nested:
        factors = num_blocks, num_inputs // BLOCK, 2, OUTPUTS
        shapes["factors"] = factors, torch.uint8 if format.has_min else torch.int8
    return shapes


def planes_of(weight: BlockWeight) -> BlockPlanes:
    """The planes of a weight, on its device."""
    format, (n, k), device = weight.format, weight.shape, weight.tiles.device
    shapes = plane_shapes(format, n, k)
    made = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }
    planes = BlockPlanes(
        format=format,
        words=made["words"],
        high=made.get("high"),
        scales=made["scales"],
        factors=made.get("factors"),
    )
    for begin in range(0, len(weight.tiles), _TILES):
        _fill(planes, weight.tiles[begin : begin + _TILES], begin * TILE_ROWS)
    return planes


def _fill(planes: BlockPlanes, tiles: torch.Tensor, first_row: int) -> None:
    """Writes the rows of some tiles, whole blocks of them but at the end."""
    format, (n, k) = planes.format, planes.shape
    count = min(len(tiles) * TILE_ROWS, n - first_row)
    values = read_values(tiles, format).flatten(0, 1)[:count]
    rows = slice(first_row, first_row + count)
    blocks = slice(first_row // OUTPUTS, -(-(first_row + count) // OUTPUTS))
    if format.bits == 8:
        is_ordered = k % byte_layout.TILE == 0
        planes.words[rows] = byte_layout.ordered(values) if is_ordered else values.view(torch.int32)
    else:
        planes.words[rows] = int4_layout.pack(values & 15)
    if planes.high is not None:
        for bit, plane in enumerate(planes.high):
            of_blocks = _in_blocks(_high_bits(values >> 4 + bit & 1), plane[blocks].shape[0])
            plane[blocks] = of_blocks.transpose(1, 2)
    scales = read_scales(tiles, format)
    of_units = _pairs(scales.scale, scales.minimum)[:count]
    # What sub-blocks of a unit have in common is repeated there.
    of_units = of_units[:, :: of_units.shape[1] // planes.scales.shape[1]]
    planes.scales[blocks] = (
        _in_blocks(of_units, planes.scales[blocks].shape[0]).permute(0, 2, 3, 1).half()
    )
    if planes.factors is not None:
        factors = _factors(scales)[:count]
        of_blocks = _in_blocks(factors, planes.factors[blocks].shape[0]).permute(0, 2, 3, 1)
        planes.factors[blocks] = of_blocks.to(planes.factors.dtype)


def _pairs(first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """[tiles, 16, groups] → [rows, groups, 1 or 2]"""
    parts = [first] if second is None else [first, second]
    return torch.stack(parts, dim=3).flatten(0, 1)


def _factors(scales: Scales) -> torch.Tensor:
    """int32 [rows, K / 32, 2]"""
    assert scales.factor is not None
    if scales.min_factor is None:
        num_tiles, num_rows, num_factors = scales.factor.shape
        return scales.factor.reshape(num_tiles * num_rows, num_factors // 2, 2)
    return _pairs(scales.factor, scales.min_factor)


def _in_blocks(of_rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[rows, …] → [blocks, 64, …], filled up with zeros."""
    whole = of_rows.new_zeros(num_blocks * OUTPUTS, *of_rows.shape[1:])
    whole[: len(of_rows)] = of_rows
    return whole.view(num_blocks, OUTPUTS, *of_rows.shape[1:])


def _high_bits(bits: torch.Tensor) -> torch.Tensor:
    """Packs uint8 [N, K] of one bit into elements [N, tiles, 4], as `BlockPlanes.high` has them."""
    n, k = bits.shape
    blocks = depth(k) // BLOCK
    # [N, tiles, i, p, c, e] -> [N, tiles, c, e, i, p]
    of_words = (
        bits.view(n, -1, blocks, 4, 4, 2).permute(0, 1, 4, 5, 2, 3).reshape(n, k // depth(k), 4, -1)
    )
    shifts = torch.arange(of_words.shape[3], device=bits.device)
    # Sums of powers of two: the highest bit of a type is its sign.
    return (of_words.long() << shifts).sum(3).to(_HIGH[depth(k)])


def expand(planes: BlockPlanes, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K] with the bits of `block_formats.expand`: in plain torch, the specification
    of the kernels."""
    return expand_rows(planes, torch.arange(planes.shape[0], device=planes.words.device), dtype)


def expand_rows(planes: BlockPlanes, row_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, K] of the weights at row_ids, integers [T]."""
    k = planes.shape[1]
    num_rows = _TILES * TILE_ROWS
    out = torch.empty(len(row_ids), k, dtype=dtype, device=planes.words.device)
    for begin in range(0, len(row_ids), num_rows):
        ids = row_ids[begin : begin + num_rows].long()
        values = _values(planes, ids).float() - planes.format.offset
        scale, added = _scales(planes, ids)
        values *= scale
        out[begin : begin + num_rows] = (values if added is None else values + added).to(dtype)
    return out


def _scales(planes: BlockPlanes, row_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scale of each weight and what is added to it, float32 [T, K] each."""
    format = planes.format
    k = planes.shape[1]
    blocks = row_ids // OUTPUTS
    places = row_ids % OUTPUTS

    def of_inputs(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.float().repeat_interleave(k // numbers.shape[1], dim=1)

    # [T, units, 1 or 2], [T, K / 32, 2]
    scales = planes.scales.movedim(3, 1)[blocks, places]
    first = of_inputs(scales[..., 0])
    second = of_inputs(scales[..., 1]) if format.has_min else None
    if planes.factors is not None:
        factors = planes.factors.movedim(3, 1)[blocks, places]
        first = first * of_inputs(factors[..., 0] if format.has_min else factors.flatten(1))
        if second is not None:
            second = -(second * of_inputs(factors[..., 1]))
    return first, second


def _values(planes: BlockPlanes, row_ids: torch.Tensor) -> torch.Tensor:
    """The stored numbers, uint8 [T, K]."""
    words = planes.words[row_ids]
    k = planes.shape[1]
    if planes.format.bits == 8:
        is_ordered = k % byte_layout.TILE == 0
        return byte_layout.restored(words, torch.uint8) if is_ordered else words.view(torch.uint8)
    values = int4_layout.unpack(words)
    for bit, plane in enumerate(() if planes.high is None else planes.high):
        # [T, tiles, 4]
        elements = plane.transpose(1, 2)[row_ids // OUTPUTS, row_ids % OUTPUTS]
        blocks = depth(k) // BLOCK
        bits = elements.long()[..., None] >> torch.arange(8 * blocks, device=elements.device) & 1
        # [T, tiles, c, e, i, p] -> [T, tiles, i, p, c, e]
        bits = bits.view(len(row_ids), -1, 4, 2, blocks, 4).permute(0, 1, 4, 5, 2, 3).reshape(-1, k)
        values = values | bits.to(torch.uint8) << 4 + bit
    return values
