"""Compares drafted tokens with the tokens that were sampled in their places, to find how many of
them are accepted.

Every position is sampled as if the drafts before it stood, with its own noise, mask and penalties.
Up to the first draft that differs from what was sampled in its place that is true, so what a row
gains, the sampled tokens up to and with that place, is what it would have gained one token at a
time. Nothing is accepted by chance, so the distribution is the plain one as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..executor import Int32Array
from ..ragged import places
from ..request import TokenLogprobs

NO_TOKEN = -1


class Gained(NamedTuple):
    """Tokens that the rows of a step gained."""

    token_ids: Int32Array
    """[S, n]; of row j the first num_tokens[j] count."""
    num_tokens: Int32Array
    """[S]"""

    @property
    def places(self) -> tuple[Int32Array, Int32Array]:
        """Row and column of every token that counts."""
        rows = np.repeat(np.arange(len(self.num_tokens), dtype=np.int32), self.num_tokens)
        return rows, places(self.num_tokens)


def positions_of(num_drafts: Int32Array | None, num_rows: int) -> Int32Array:
    """Number of sampled positions of each row, int32 [R]: one more than it has drafts."""
    return np.ones(num_rows, np.int32) if num_drafts is None else num_drafts + 1


def drafts_in_place(num_drafts: Int32Array, draft_ids: Int32Array) -> Int32Array:
    """Draft in the place of each sampled token, int32 [sum of num_drafts + 1], of draft_ids [sum of
    num_drafts]; in the place of a row's last token there is none."""
    num_positions = num_drafts + 1
    drafts = np.full(num_positions.sum(), NO_TOKEN, np.int32)
    drafts[places(num_positions) < np.repeat(num_drafts, num_positions)] = draft_ids
    return drafts


def gained(sampled: Int32Array, drafts: Int32Array, num_positions: Int32Array) -> Gained:
    """Tokens that rows gain. sampled and drafts are [sum of num_positions], row by row: a row's
    sampled tokens, and the draft in the place of each; in the place of a row's last token there is
    none, and its value is ignored."""
    num_rows = len(num_positions)
    if len(sampled) == num_rows:
        # Each row has at least one position, so here each has exactly one.
        return Gained(sampled[:, None], num_positions)
    most = int(num_positions.max(initial=1))
    rows = np.repeat(np.arange(num_rows), num_positions)
    columns = places(num_positions)
    token_ids = np.full((num_rows, most), NO_TOKEN, np.int32)
    token_ids[rows, columns] = sampled
    ends = (sampled != drafts) | (columns + 1 == num_positions[rows])
    is_end = np.zeros((num_rows, most), np.bool_)
    is_end[rows, columns] = ends
    return Gained(token_ids, is_end.argmax(axis=1).astype(np.int32) + 1)


def by_entry(
    found: Gained, num_positions: Int32Array, logprobs: Mapping[int, TokenLogprobs]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of gained tokens, in the form of `StepResult`, from those of all sampled
    positions, row by row."""
    if not logprobs:
        return {}
    rows, columns = found.places
    first = np.cumsum(num_positions) - num_positions
    most = found.token_ids.shape[1]
    flat = zip((first[rows] + columns).tolist(), (rows * most + columns).tolist(), strict=True)
    return {entry: logprobs[position] for position, entry in flat if position in logprobs}
