"""Plan of attention to chosen latents on a CPU: pieces of a batch's tokens, whose chosen latents
lie together for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..attention import AttentionPlan, plan_attention
from ..compiler.simd_types import NUM_LANES

TOKENS = 16
"""Tokens of a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPiece:
    """Some of a batch's tokens."""

    first: int
    stop: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    """int [tokens, 3]: position, row of the block tables, number of latents chosen."""
    num_keys: int
    """Latents up to the last position."""
    attention: AttentionPlan
    """Plan over what is gathered, one block of `ChosenPlan.room` latents a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """The same for every layer."""

    block_tables: torch.Tensor
    """int32 [R, blocks], contiguous"""
    room: int
    """Latents that a token has room for."""
    pieces: tuple[ChosenPiece, ...]


def plan_chosen(
    starts: ArrayLike, counts: ArrayLike, block_tables: torch.Tensor, group: int, num_chosen: int
) -> ChosenPlan:
    """Plan for requests that compute positions starts[i] … starts[i] + counts[i] − 1, each of which
    attends to at most `num_chosen` latents with `group` heads; block_tables int32 [R, blocks]."""
    starts_ = np.asarray(starts, np.int64)
    counts_ = np.asarray(counts, np.int64)
    rows = np.repeat(np.arange(len(counts_)), counts_)
    positions = np.arange(len(rows)) + np.repeat(starts_ - counts_.cumsum() + counts_, counts_)
    tokens = np.stack((positions, rows, np.minimum(positions + 1, num_chosen)), 1).astype(np.int32)
    pieces = []
    for first in range(0, len(tokens), TOKENS):
        own = tokens[first : first + TOKENS]
        places = torch.arange(len(own), dtype=torch.int32)[:, None]
        pieces.append(
            ChosenPiece(
                first=first,
                stop=first + len(own),
                tokens=own,
                num_keys=int(own[:, 0].max()) + 1,
                attention=plan_attention(own[:, 2] - 1, np.ones(len(own)), places, group),
            )
        )
    return ChosenPlan(
        block_tables=block_tables.contiguous(),
        room=-(-num_chosen // NUM_LANES) * NUM_LANES,
        pieces=tuple(pieces),
    )
