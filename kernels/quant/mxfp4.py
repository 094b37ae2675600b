"""Weights in MXFP4 in the order that kernels read them in, and what they expand to. Source: Open
Compute Project, "OCP microscaling formats", 2023. Knows no file format.

A weight is a number of e2m1 (a sign, two bits of exponent, one of mantissa) times a power of two,
which 32 inputs of an output share. A row is cut into tiles of 128 inputs, the last one filled up
with zeros, and these into blocks of 32. Word c of a block, of four, holds in its half e the input
8 p + 2 c + e for p = 0 … 3. In a tile the words c of all blocks are neighbours: a thread reads them
at once. In a half of a word, the bits of a number lie so that one shift and one mask make it a
bfloat16 number, 2**126 times too small:

    bits 15, 8, 7, 6 of p = 0; 12, 5, 4, 3 of p = 1; 9, 2, 1, 0 of p = 2; 14, 11, 10, 13 of p = 3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32
"""Number of inputs that share a scale."""
TILE = 128
WORD = 8
"""Number of weights in an int32."""
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""Bits of the number p in a half of a word, the sign first."""
MOST_SCALE = 128
"""Largest scale, 2: a kernel multiplies scales by 2**126."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1 by their bits, without the sign."""
_ROWS = 1024
"""Number of rows that are unpacked at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Weight:
    """A weight [N, K]."""

    words: torch.Tensor
    """int32 [N, ceil(K / 128) * 16]"""
    scales: torch.Tensor
    """uint8 [K / 32, N] of e8m0: 2**(scale - 127), each at most `MOST_SCALE`."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], len(self.scales) * BLOCK


def num_words(num_inputs: int) -> int:
    """Number of words of a row."""
    return -(-num_inputs // TILE) * TILE // WORD


def pack(pairs: torch.Tensor) -> torch.Tensor:
    """Packs bytes [N, K / 2] of two numbers each, the first one in the lower half, into words int32
    [N, num_words(K)]; on a CPU."""
    n, num_pairs = pairs.shape
    assert num_pairs % (BLOCK // 2) == 0
    num_blocks = num_pairs // (BLOCK // 2)
    words = np.zeros((n, num_words(2 * num_pairs)), np.uint32)
    tiles = words.reshape(n, -1, 4, TILE // BLOCK)
    bytes_of = pairs.numpy().reshape(n, num_blocks, 4, 4)
    for begin in range(0, n, _ROWS):
        # [N, blocks, p, c] → [N, blocks, c]
        own = bytes_of[begin : begin + _ROWS]
        of_blocks = _TABLES[0][own[:, :, 0]]
        for p in (1, 2, 3):
            of_blocks |= _TABLES[p][own[:, :, p]]
        padding = ((0, 0), (0, -num_blocks % (TILE // BLOCK)), (0, 0))
        of_tiles = np.pad(of_blocks, padding).reshape(len(own), -1, TILE // BLOCK, 4)
        tiles[begin : begin + _ROWS] = of_tiles.swapaxes(2, 3)
    return torch.from_numpy(words.view(np.int32))


def unpack(words: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Unpacks words int32 [N, num_words(K)] into uint8 [N, K] of 0…15."""
    n = len(words)
    halves = words.contiguous().view(torch.int16).int() & 0xFFFF
    # [N, tiles, c, blocks, e] → [N, tiles, blocks, c, e]
    halves = halves.view(n, -1, 4, TILE // BLOCK, 2).transpose(2, 3)
    numbers = torch.stack([_bits_of(halves, places) for places in PLACES], dim=3)
    return numbers.reshape(n, -1)[:, :num_inputs].to(torch.uint8)


def expand(weight: Mxfp4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each rounded to the dtype once, which bfloat16 and float32 hold as they
    are: in plain torch, the specification of all kernels."""
    n, k = weight.shape
    device = weight.words.device
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), device=device)
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(256)], device=values.device)
    out = torch.empty(n, k, dtype=dtype, device=values.device)
    for begin in range(0, n, _ROWS):
        rows = slice(begin, begin + _ROWS)
        numbers = values[unpack(weight.words[rows], k).long()]
        of_inputs = powers[weight.scales[:, rows].t().long()].repeat_interleave(BLOCK, dim=1)
        out[rows] = (numbers * of_inputs).to(dtype)
    return out


def cut_inputs(words: torch.Tensor, inputs: range, num_inputs: int) -> torch.Tensor:
    """The words of some of a row's inputs, whole blocks of them. Where tiles stay as they are,
    nothing else is read."""
    if inputs.start % TILE == 0 and (len(inputs) % TILE == 0 or inputs.stop == num_inputs):
        first = inputs.start // WORD
        return words[:, first : first + num_words(len(inputs))].contiguous()
    numbers = unpack(words, num_inputs)[:, inputs.start : inputs.stop]
    return pack(numbers[:, 0::2] | numbers[:, 1::2] << 4)


def reordered(weight: Mxfp4Weight, rows: torch.Tensor) -> Mxfp4Weight:
    """The weight of rows at places [N] in another order."""
    return Mxfp4Weight(words=weight.words[rows], scales=weight.scales[:, rows])


def _bits_of(halves: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Numbers 0…15 whose bits are at these positions, highest first."""
    found = torch.zeros_like(halves)
    for i, place in enumerate(places):
        found |= ((halves >> place) & 1) << (3 - i)
    return found


def _table(p: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Words of a byte of two numbers."""
    placed = [
        sum((number >> 3 - i & 1) << place for i, place in enumerate(PLACES[p]))
        for number in range(16)
    ]
    words = [placed[byte & 15] | placed[byte >> 4] << 16 for byte in range(256)]
    return np.array(words, np.uint32)


_TABLES = [_table(p) for p in range(4)]
