"""Inputs of a step on a GPU: words staged in pinned memory, copied at once, and read by all
launches of the step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ..device.step_shapes import StepShape, aligned, num_decodes

NUM_UPDATES = 4096
"""Most words of the request table that a step changes through this buffer; a longer list is copied
separately."""
_HEAD = 4
"""Words before the draws; the first two say where results go, and what rows gained."""


@dataclass(frozen=True, slots=True)
class Words:
    """Integers of one step, as slices of one buffer: torch's on the device, numpy's in pinned
    memory."""

    rows: Any
    """[T] of the request table."""
    positions: Any
    """[T]"""
    seq_lens: Any
    """[decodes] keys that each reads."""
    table_rows: Any
    """Rows of the request table [decodes]."""
    chunk_lens: Any
    """[chunks] keys that the last token of each reads."""
    chunk_rows: Any
    """[chunks] of the request table."""
    query_starts: Any
    """[chunks + 1] into the tokens."""
    end_tokens: Any
    """[ends] into the tokens."""
    end_lens: Any
    """[ends] number of keys that each reads; 0: unused."""
    end_rows: Any
    """[ends] of the request table."""
    tiles: Any
    """[2 tiles]"""


class StepBuffers:
    """One buffer on the device, and a pinned one for each step whose copy is in flight."""

    def __init__(
        self, config: EngineConfig, max_tiles: int, device: torch.device, num_sends: int
    ) -> None:
        """`num_sends`: steps that may be sent before the first of them is done."""
        self._draw_stride = aligned(config.max_positions)
        num_tokens = max(config.max_num_batched_tokens, config.max_positions)
        most = StepShape(
            num_tokens=num_tokens,
            num_decodes=config.max_positions,
            num_chunks=config.max_positions,
            num_tiles=max_tiles,
            num_ends=config.max_positions,
        )
        self._row_stride = aligned(config.max_num_seqs)
        self._first_row = _HEAD + 4 * self._draw_stride
        self._first_word = self._first_row + 5 * self._row_stride
        size = self._first_word + most.num_words + 2 * NUM_UPDATES
        self._words = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [
            torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(num_sends)
        ]
        self._staged: list[Int32Array] = [each.numpy() for each in self._pinned]
        self.first_result = self._words[:1]
        self.first_results = self._words[:2]
        # A row of each: table rows, positions, output indices, and which hidden states of the step
        # are sampled after.
        self.draws = self._words[_HEAD : self._first_row].view(4, -1)
        # Words of a step in which the device drafts: see `draft_rows`.
        self.steps = self._words[self._first_row : self._first_word].view(5, -1)
        self.steps.fill_(-1)

    def words(self, shape: StepShape) -> Words:
        """Device memory from which the launches of this shape read their step."""
        return self._split(self._words, shape)

    def send(
        self,
        plan: StepPlan,
        shape: StepShape,
        tiles: Int32Array,
        num_draws: int,
        updates: Int32Array,
        first_results: tuple[int, int],
        steps: Int32Array | None = None,
        num_left: Int32Array | None = None,
    ) -> torch.Tensor | None:
        """Copies a step to the device, padded to the shape and to `num_draws`; updates are int32
        [2, U], `steps` [5, R] as in `draft_rows`, `num_left` [S] as in `stored_drafts`, in place of
        which hidden states are sampled after. Returns updates on the device, if they went along."""
        turn = plan.step % len(self._staged)
        staged = self._staged[turn]
        staged[:2] = first_results
        draws = staged[_HEAD : self._first_row].reshape(4, -1)
        _stage_draws(plan, shape, draws, num_draws)
        if num_left is not None:
            draws[3, : len(num_left)] = num_left
        if steps is not None:
            staged[self._first_row : self._first_word].reshape(5, -1)[:, : steps.shape[1]] = steps
        _stage(plan, shape, tiles, self._split(staged, shape))
        end = first = self._first_word + shape.num_words
        if updates.shape[1] <= NUM_UPDATES:
            end += updates.size
            staged[first:end] = updates.reshape(-1)
        self._words[:end].copy_(self._pinned[turn][:end], non_blocking=True)
        return self._words[first:end].view(2, -1) if end > first else None

    def clear(self, shape: StepShape, num_draws: int) -> None:
        """A step of this shape that is all padding."""
        words = self.words(shape)
        for field in fields(Words):
            getattr(words, field.name).zero_()
        words.rows.fill_(-1)
        words.tiles.fill_(-1)
        self.draws[:, :num_draws].zero_()
        self.draws[0, :num_draws].fill_(-1)
        self.steps.fill_(-1)
        self.first_results.zero_()

    def _split(self, words: Any, shape: StepShape) -> Words:
        first = self._first_word
        columns = []
        for size in shape.sizes:
            columns.append(words[first : first + size])
            first += aligned(size)
        return Words(*columns)


def _stage(plan: StepPlan, shape: StepShape, tiles: Int32Array, words: Words) -> None:
    n = num_decodes(plan)
    ends = plan.starts + plan.counts
    last = np.cumsum(plan.counts)
    num_tokens = int(last[-1])
    if n == num_tokens:
        words.rows[:n] = plan.rows
        words.positions[:n] = plan.starts
    else:
        words.rows[:num_tokens] = np.repeat(plan.rows, plan.counts)
        words.positions[:num_tokens] = np.arange(num_tokens) - np.repeat(last - ends, plan.counts)
    words.rows[num_tokens:] = -1
    words.positions[num_tokens:] = 0
    words.seq_lens[:n] = ends[:n]
    words.seq_lens[n:] = 0
    words.table_rows[:n] = plan.rows[:n]
    words.table_rows[n:] = 0
    if shape.num_chunks:
        count = len(plan.rows) - n
        words.chunk_lens[:count] = ends[n:]
        words.chunk_lens[count:] = 0
        words.chunk_rows[:count] = plan.rows[n:]
        words.chunk_rows[count:] = 0
        words.query_starts[0] = n
        words.query_starts[1 : count + 1] = last[n:]
        words.query_starts[count + 1 :] = num_tokens
        words.tiles[: tiles.size] = tiles.reshape(-1)
        words.tiles[tiles.size :] = -1
    if shape.num_ends:
        count = len(plan.rows)
        words.end_tokens[:count] = last - 1
        words.end_tokens[count:] = 0
        words.end_lens[:count] = np.where(plan.samples | plan.holds, ends, 0)
        words.end_lens[count:] = 0
        words.end_rows[:count] = plan.rows
        words.end_rows[count:] = 0


def _stage_draws(plan: StepPlan, shape: StepShape, draws: Int32Array, num_draws: int) -> None:
    sampled = plan.samples
    ends = plan.starts + plan.counts
    count = int(sampled.sum())
    draws[0, count:num_draws] = -1
    draws[1:, count:num_draws] = 0
    draws[0, :count] = plan.rows[sampled]
    draws[1, :count] = ends[sampled] - 1
    draws[2, :count] = plan.output_indices[sampled]
    draws[3, :count] = shape.last_states(plan)[sampled]
