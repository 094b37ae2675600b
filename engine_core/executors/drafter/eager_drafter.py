"""Drafters that compute at once, over the request table."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ...executor import BoolArray, Int32Array
from ...sampling.sampler import Sampler
from ..entry.eager_entry import EagerStep
from ..step_parts import Drafter
from ..table.eager_table import EagerTable


class EagerDrafter(Drafter[EagerStep], Protocol):
    """See `Drafter`. A row that is given drafts is a decode row: its one known token is computed
    before them."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the served model whose inputs it reads."""

    @property
    def looks_at_all(self) -> bool:
        """Whether the drafter reads the normed hidden states of all tokens, not only of the sampled
        positions."""


class Drafts:
    """Draws of drafts, which go to the request table. They are drawn as the row's own tokens are,
    with the same noise, which makes them equal oftener than two draws of their own would be."""

    def __init__(self, table: EagerTable, sampler: Sampler) -> None:
        self._table = table
        self._sampler = sampler

    def put(self, logits: torch.Tensor, rows: Int32Array, at: Int32Array) -> None:
        """Draws a token from logits [R, V] for position at[i] of table rows [R]."""
        self._table.token_ids.numpy()[rows, at] = self.draw(logits, rows, at)

    def draw(self, logits: torch.Tensor, rows: Int32Array, at: Int32Array) -> Int32Array:
        """Tokens int32 [R]; see `put`."""
        table = self._table
        outputs = at - table.num_prompt[rows]
        return self._sampler.draw(
            logits, rows, outputs, lambda i: table.outputs(int(rows[i]), int(at[i]))
        )


def picked(states: torch.Tensor, is_picked: BoolArray) -> torch.Tensor:
    """Rows of states [R, H] that are picked."""
    return states[torch.from_numpy(np.asarray(is_picked)).to(states.device)]
