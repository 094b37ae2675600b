"""Weights in GGUF's block formats, in the order in which kernels read them, and what they expand
to.

Sixteen rows make a tile, a multiple of 32 inputs a unit. What a format stores for a unit of sixteen
rows lies together: scales, then the bits of the weights, four inputs of each row in a 32-bit word,
so that one vector holds four inputs of all sixteen rows. A tile takes as many bytes as its rows do
in the file. Source of the formats: ggml's `ggml-quants.c`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ROWS = 16
BLOCK = 32
"""Inputs that share a scale of activations."""
SUPER_BLOCK = 256
"""Inputs of a unit of the formats with two levels of scales."""
_TILES = 64
"""Number of tiles that are expanded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Storage of a unit of one row: `scales` bytes of scales, then `bits` a weight."""

    name: str
    type_id: int
    """ggml's number of the type."""
    bits: int
    scales: int
    has_min: bool = False
    """A weight is scale * q + min (minus it in the K formats) rather than scale * (q - offset)."""
    unit: int = BLOCK
    """Number of inputs in a unit."""

    @property
    def offset(self) -> int:
        """Number that is subtracted from the stored number."""
        return 0 if self.has_min else 1 << (self.bits - 1)

    @property
    def unit_bytes(self) -> int:
        """Number of bytes in a unit of one row."""
        return self.scales + self.unit * self.bits // 8

    @property
    def is_nested(self) -> bool:
        """Whether scales of sub-blocks are integers times a scale of the unit."""
        return self.unit == SUPER_BLOCK


Q4_0 = BlockFormat(name="q4_0", type_id=2, bits=4, scales=2)
Q4_1 = BlockFormat(name="q4_1", type_id=3, bits=4, scales=4, has_min=True)
Q5_0 = BlockFormat(name="q5_0", type_id=6, bits=5, scales=2)
Q5_1 = BlockFormat(name="q5_1", type_id=7, bits=5, scales=4, has_min=True)
Q8_0 = BlockFormat(name="q8_0", type_id=8, bits=8, scales=2)
Q4_K = BlockFormat(name="q4_k", type_id=12, bits=4, scales=16, has_min=True, unit=SUPER_BLOCK)
Q5_K = BlockFormat(name="q5_k", type_id=13, bits=5, scales=16, has_min=True, unit=SUPER_BLOCK)
Q6_K = BlockFormat(name="q6_k", type_id=14, bits=6, scales=18, unit=SUPER_BLOCK)
FORMATS = {each.type_id: each for each in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)}
"""Formats by ggml's number of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """A weight [N, K] of one format."""

    format: BlockFormat
    tiles: torch.Tensor
    """uint8 [ceil(N / 16), K / unit, 16 * unit_bytes]; rows beyond N are zeros."""
    num_rows: int
    """Number of outputs, N."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.tiles.shape[1] * self.format.unit


def pack(rows: torch.Tensor, format: BlockFormat) -> BlockWeight:
    """The weight [N, K] of rows uint8 [N, K / unit * unit_bytes] as a GGUF file holds them."""
    n = len(rows)
    units = rows.view(n, -1, format.unit_bytes)
    # [N, units, bytes] -> [tiles, units, 16, bytes]
    units = torch.nn.functional.pad(units, (0, 0, 0, 0, 0, -n % TILE_ROWS))
    units = units.view(-1, TILE_ROWS, *units.shape[1:]).transpose(1, 2)
    scales, values = (
        _read_nested(units, format) if format.is_nested else _read_simple(units, format)
    )
    parts = [*scales, *_stored(values, format.bits)]
    return BlockWeight(
        format=format, tiles=torch.cat([part.flatten(2) for part in parts], dim=2), num_rows=n
    )


def expand(weight: BlockWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each computed in float32 as the `gguf` package does and rounded to the
    dtype once: in plain torch, the specification of all kernels."""
    n, k = weight.shape
    out = torch.empty(len(weight.tiles) * TILE_ROWS, k, dtype=dtype, device=weight.tiles.device)
    for begin in range(0, len(weight.tiles), _TILES):
        tiles = weight.tiles[begin : begin + _TILES]
        scales = read_scales(tiles, weight.format)
        q = read_values(tiles, weight.format).float()
        scale = scales.whole_scale
        minimum = scales.whole_min
        q = q.view(*scale.shape, -1)
        whole = (
            (q - weight.format.offset) * scale[..., None]
            if minimum is None
            else q * scale[..., None]
        )
        if minimum is not None:
            whole = (
                whole - minimum[..., None]
                if weight.format.is_nested
                else whole + minimum[..., None]
            )
        # [tiles, 16, sub-blocks, inputs]
        out[begin * TILE_ROWS : (begin + len(tiles)) * TILE_ROWS] = whole.reshape(-1, k).to(dtype)
    return out[:n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of some tiles: [tiles, 16, sub-blocks of a row]. A sub-block is 32 inputs, in Q6_K
    16."""

    scale: torch.Tensor
    """float32: scale of the unit."""
    minimum: torch.Tensor | None
    """float32: minimum of the unit."""
    factor: torch.Tensor | None
    """int32: factor of the sub-block's scale; None: 1."""
    min_factor: torch.Tensor | None
    """int32: factor of the sub-block's minimum; None: 1."""

    @property
    def whole_scale(self) -> torch.Tensor:
        return self.scale if self.factor is None else self.scale * self.factor.float()

    @property
    def whole_min(self) -> torch.Tensor | None:
        if self.minimum is None or self.min_factor is None:
            return self.minimum
        return self.minimum * self.min_factor.float()


def read_scales(tiles: torch.Tensor, format: BlockFormat) -> Scales:
    """Reads the scales of tiles uint8 [tiles, units, bytes]."""
    num_tiles, num_units = tiles.shape[:2]
    count = 2 if format.has_min else 1
    halves = tiles[:, :, : count * 2 * TILE_ROWS].contiguous().view(torch.float16).float()
    # [tiles, units, scale or min, 16] -> [tiles, 16, units]
    halves = halves.view(num_tiles, num_units, count, TILE_ROWS)
    scale = halves[:, :, 0].transpose(1, 2)
    minimum = halves[:, :, 1].transpose(1, 2) if format.has_min else None
    if not format.is_nested:
        return Scales(scale=scale, minimum=minimum, factor=None, min_factor=None)
    own = tiles[:, :, count * 2 * TILE_ROWS : TILE_ROWS * format.scales].reshape(
        num_tiles, num_units, -1, TILE_ROWS
    )
    if not format.has_min:
        factor = own.view(torch.int8).int()
        min_factor = None
    else:
        low = own[:, :, :8].int()
        high = own[:, :, 8:].int()
        high = torch.stack((high & 15, high >> 4), dim=3).flatten(2, 3)
        factor = low & 15 | (high & 3) << 4
        min_factor = low >> 4 | (high >> 2) << 4
    size = factor.shape[2]

    def of_rows(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.permute(0, 3, 1, 2).flatten(2)

    return Scales(
        scale=scale.repeat_interleave(size, dim=2),
        minimum=None if minimum is None else minimum.repeat_interleave(size, dim=2),
        factor=of_rows(factor),
        min_factor=None if min_factor is None else of_rows(min_factor),
    )


def read_values(tiles: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    """The stored numbers, uint8 [tiles, 16, K], of tiles uint8 [tiles, units, bytes]."""
    num_tiles, num_units = tiles.shape[:2]
    data = tiles[:, :, TILE_ROWS * format.scales :]
    blocks = format.unit // BLOCK
    if format.bits == 8:
        words = data.reshape(num_tiles, num_units, blocks, 8, TILE_ROWS, 4)
    else:
        high_bytes = TILE_ROWS * format.unit * (format.bits - 4) // 8
        pairs = data[:, :, high_bytes:].reshape(num_tiles, num_units, blocks, 4, TILE_ROWS, 4)
        words = torch.stack((pairs & 15, pairs >> 4), dim=4).flatten(3, 4)
        if format.bits == 5:
            high = data[:, :, :high_bytes].reshape(num_tiles, num_units, blocks, 1, TILE_ROWS, 4)
            words = words | (torch.cat([high >> step & 1 for step in range(8)], dim=3) << 4)
        if format.bits == 6:
            high = data[:, :, :high_bytes].reshape(num_tiles, num_units, blocks, 2, 1, TILE_ROWS, 4)
            steps = torch.cat([high >> 2 * step & 3 for step in range(4)], dim=4).flatten(3, 4)
            words = words | (steps << 4)
    # [tiles, units, blocks, steps, 16, 4] -> [tiles, 16, K]
    return words.permute(0, 4, 1, 2, 3, 5).reshape(num_tiles, TILE_ROWS, -1)


def _stored(values: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Converts values uint8 [tiles, units, 16, unit] to the parts that `read_values` reads, [tiles,
    units, …] each."""
    shape = values.shape
    # [tiles, units, blocks, steps, 16, 4]
    words = values.view(*shape[:2], TILE_ROWS, -1, 8, 4).permute(0, 1, 3, 4, 2, 5)
    if bits == 8:
        return [words]
    pairs = words.unflatten(3, (4, 2))
    nibbles = pairs[..., 0, :, :] & 15 | (pairs[..., 1, :, :] & 15) << 4
    high = words >> 4
    if bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8).view(8, 1, 1)
        return [(high << shifts).sum(3, dtype=torch.uint8), nibbles]
    if bits == 6:
        shifts = 2 * torch.arange(4, dtype=torch.uint8).view(4, 1, 1)
        return [(high.unflatten(3, (2, 4)) << shifts).sum(4, dtype=torch.uint8), nibbles]
    return [nibbles]


def _read_simple(
    units: torch.Tensor, format: BlockFormat
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads a file's units, uint8 [tiles, units, 16, bytes]: scales by number, and values [tiles,
    units, 16, 32]."""
    scales = units[..., : format.scales]
    data = units[..., format.scales :]
    parts = [scales[..., at : at + 2] for at in range(0, format.scales, 2)]
    if format.bits == 8:
        return parts, data ^ 0x80
    high = data[..., :-16]
    nibbles = torch.cat((data[..., -16:] & 15, data[..., -16:] >> 4), dim=-1)
    if format.bits == 5:
        nibbles = (
            nibbles | ((high[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2) << 4
        )
    return parts, nibbles


def _read_nested(
    units: torch.Tensor, format: BlockFormat
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Reads a file's units of 256 inputs, otherwise as `_read_simple`."""
    if not format.has_min:
        low, high, factors, scale = units.split((128, 64, 16, 2), dim=-1)
        # Two halves of 128 inputs, each 64 bytes of low nibbles before high ones and 32 bytes of
        # four pairs of bits.
        low = low.unflatten(-1, (2, 1, 64))
        high = high.unflatten(-1, (2, 1, 32))
        nibbles = torch.cat((low & 15, low >> 4), dim=-2).flatten(-3)
        upper = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
        return [scale, factors.transpose(2, 3)], nibbles | upper << 4
    scale, minimum, factors, data = units.split((2, 2, 12, len(units[0, 0, 0]) - 16), dim=-1)
    packed = _factors(factors)
    high = data[..., :-128]
    data = data[..., -128:]
    # Four times 64 inputs: 32 bytes, low nibbles before high ones.
    data = data.unflatten(-1, (4, 1, 32))
    values = torch.cat((data & 15, data >> 4), dim=-2).flatten(-3)
    if format.bits == 5:
        values = values | torch.cat([high >> block & 1 for block in range(8)], dim=-1) << 4
    return [scale, minimum, *packed], values


def _factors(packed: torch.Tensor) -> list[torch.Tensor]:
    """Converts eight scales and eight minima of six bits, uint8 [tiles, units, 16, 12], to the low
    nibbles of both [tiles, units, 8, 16] and their upper bits, two sub-blocks a byte [tiles, units,
    4, 16]."""
    first, second, third = packed.split(4, dim=-1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    low = scale & 15 | (minimum & 15) << 4
    high = scale >> 4 | minimum >> 4 << 2
    high = high[..., 0::2] | high[..., 1::2] << 4
    return [low.transpose(2, 3), high.transpose(2, 3)]
