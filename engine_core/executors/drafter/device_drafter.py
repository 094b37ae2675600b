"""Contract of drafters in an executor, which draft from the served model's states. Knows neither
plans nor sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...executor import Int32Array

Draw = Callable[[torch.Tensor, Int32Array, Int32Array], Int32Array]
"""Logits [R, V], table rows [R], and positions [R] of the tokens that are drawn from them → tokens
int32 [R]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Hidden states of one pass of the served model, for a drafter: T tokens of R rows, rows one
    after another."""

    rows: Int32Array
    """[R] table rows."""
    starts: Int32Array
    """[R] first position of each."""
    counts: Int32Array
    """[R] positions of each."""
    num_drafts: Int32Array
    """[R] positions of each, the last ones, that hold guesses."""
    num_sampled: Int32Array
    """[R] positions of each, the last ones, after which a token is sampled."""
    final: torch.Tensor
    """Normed hidden states: [T, H] of a drafter that looks at all, otherwise those of sampled
    positions."""
    inputs: Mapping[int, torch.Tensor]
    """[T, H] by layer, of those that the drafter names."""


class DeviceDrafter(Protocol):
    """Reads tokens and blocks from the tables of a `Runner`, int32 [rows, length] and [rows, max
    blocks], and writes its guesses there. What it guesses changes no token of an answer."""

    most: int
    """Guesses for one row and step, at most."""
    layers: tuple[int, ...]
    """Layers of the served model whose inputs it is shown."""
    looks_at_all: bool
    """Whether it is shown the normed hidden states of all tokens, not only of those after which one
    is sampled."""

    @property
    def kv_caches(self) -> Sequence[torch.Tensor]:
        """Planes of its own of the KV blocks, [layers, 2, num_blocks, Hk, block_size, D] each."""

    def seat(self, row: int) -> None:
        """A request takes the row."""

    def follow(
        self,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        draw: Draw,
    ) -> None:
        """To be called before the served model computes positions starts[i] … ends[i] − 1 of
        rows[i], each of which holds a known token. Writes num_drafts[i] guesses from position
        ends[i] on; a row that gets any decodes, so that ends[i] is starts[i] + 1."""

    def see(self, computed: Computed) -> None:
        """To be called when the served model has computed a step, before anything is sampled from
        it."""
