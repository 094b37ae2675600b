"""Weights of eight bits in the order in which Hopper's kernel reads them. Knows no file format.

A row is cut into tiles of 64 inputs. Byte 4 (4 c + b) + 2 h + e of a tile is the input 16 b + 8 h +
2 c + e: so a word has what one thread of a warp hands to the matrix unit for 16 inputs, and a
thread reads its words of a tile at once.
"""

from __future__ import annotations

import torch

TILE = 64
"""The number of inputs of a row is a multiple of it."""


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Words, int32 [N, K / 4], of values of one byte [N, K]."""
    n, k = values.shape
    assert k % TILE == 0
    # [N, tiles, b, h, c, e] -> [N, tiles, c, b, h, e]
    tiles = values.view(torch.uint8).reshape(n, -1, 4, 2, 4, 2).permute(0, 1, 4, 2, 3, 5)
    return tiles.reshape(n, k).view(torch.int32)


def restored(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [N, K] of a dtype of one byte, of words as `ordered` makes them."""
    n = words.shape[0]
    k = words.shape[1] * 4
    tiles = words.view(torch.uint8).view(n, -1, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return tiles.reshape(n, k).view(dtype)
