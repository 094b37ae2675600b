"""Weights of four bits in the order that kernels read them in, and what they expand to. Knows no
file format.

A row is cut into tiles of `depth` inputs and these into blocks of 32. Word c of a block, of four,
holds in nibble 4 e + p the input 8 p + 2 c + e. So a shift by 4 p and one mask give both elements
of a pair as halves of a register, and the four pairs of a word are those that one thread of a warp
hands to the matrix unit in two steps of 16 inputs. In a tile the words c of all blocks are
neighbours: a thread reads them at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

BLOCK = 32
"""Number of inputs that all groups and rows divide by."""
DEPTHS = (128, 64, 32)
WORD = 8
"""Number of weights in an int32."""
MIDDLE = 8
"""The zero point of symmetric weights."""
MOST_SCALE = 8.0
"""Scales of weights without zero points are below: a kernel multiplies them by 2**125."""
_ROWS = 1024
"""Number of rows that are expanded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """A weight [N, K]: (q - zero) * scale, with a scale and a zero point for each output and group
    of inputs."""

    words: torch.Tensor
    """int32 [N, K / 8]"""
    scales: torch.Tensor
    """float16 or bfloat16 [groups, N]"""
    zeros: torch.Tensor | None
    """uint8 [groups, N], 0…16; None: all are `MIDDLE`, and scales are below `MOST_SCALE`."""
    groups: torch.Tensor | None = None
    """int32 [K]: the group of each input; None: groups follow one another, all of one size."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * WORD

    @property
    def group_size(self) -> int:
        return self.shape[1] // len(self.scales)


def depth(num_inputs: int) -> int:
    """Number of inputs in a tile: the largest of `DEPTHS` that divides the inputs of a row."""
    assert num_inputs % BLOCK == 0
    return next(size for size in DEPTHS if num_inputs % size == 0)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Packs uint8 [N, K] of 0…15 into int32 [N, K / 8]."""
    n, k = values.shape
    assert values.dtype == torch.uint8
    blocks = depth(k) // BLOCK
    # [N, tiles, blocks, p, c, e] → [N, tiles, c, blocks, e, p]
    nibbles = values.reshape(n, -1, blocks, 4, 4, 2).permute(0, 1, 4, 2, 5, 3).reshape(n, k // 2, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [N, K / 8] into uint8 [N, K] of 0…15."""
    n = words.shape[0]
    k = words.shape[1] * WORD
    pairs = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=-1)
    return nibbles.view(n, -1, 4, depth(k) // BLOCK, 2, 4).permute(0, 1, 3, 5, 2, 4).reshape(n, k)


def cut_inputs(words: torch.Tensor, inputs: range) -> torch.Tensor:
    """The words of a range of inputs, a multiple of 32. Where tiles stay whole, nothing else is
    read."""
    tile = depth(words.shape[1] * WORD)
    if inputs.start % tile or len(inputs) % tile or depth(len(inputs)) != tile:
        return pack(unpack(words)[:, inputs.start : inputs.stop])
    return words[:, inputs.start // WORD : inputs.stop // WORD].contiguous()


def expand(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each rounded to the dtype once: in plain torch, the specification of all
    kernels."""
    n, k = weight.shape
    of_inputs = torch.arange(k, device=weight.words.device) // weight.group_size
    of_inputs = of_inputs if weight.groups is None else weight.groups.long()
    out = torch.empty(n, k, dtype=dtype, device=weight.words.device)
    for begin in range(0, n, _ROWS):
        rows = slice(begin, begin + _ROWS)
        zero = MIDDLE if weight.zeros is None else weight.zeros[:, rows].t().float()[:, of_inputs]
        # Five bits times eleven: float32 holds the product as it is.
        numbers = unpack(weight.words[rows]).float() - zero
        out[rows] = (numbers * weight.scales[:, rows].t().float()[:, of_inputs]).to(dtype)
    return out


def zero_points(weight: Int4Weight) -> torch.Tensor:
    """uint8 [groups, N], also of symmetric weights."""
    return (
        torch.full_like(weight.scales, MIDDLE, dtype=torch.uint8)
        if weight.zeros is None
        else weight.zeros
    )


def without_zeros(weight: Int4Weight) -> Int4Weight:
    """The same weight; a symmetric one has no zero points."""
    if weight.zeros is None or bool(
        (weight.zeros != MIDDLE).any() | (weight.scales.abs() >= MOST_SCALE).any()
    ):
        return weight
    return replace(weight, zeros=None)
