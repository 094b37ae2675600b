"""Drafters on a GPU, which draft before the served model verifies: the steps they send, and how
tokens are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from headwater.kernels.rows.draft_rows import StepWords
from headwater.kernels.rows.stored_drafts import find_shifts, shift_words

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array, StepPlan
from ..device.step_shapes import StepShape, StepShapes
from ..entry.cuda_entry import SentStep
from ..entry.step_buffers import StepBuffers
from ..exit.device_sampler import PLAIN, DeviceSampler, Needs
from ..model.shown import Shown
from ..step_parts import Drafter
from ..table.device_table import NO_CHANGES, DeviceTable

SENDS_A_STEP = 2
PASSES = (8, 4, 2, 1)
"""Numbers of drafts after the first that one graph makes."""
EVERY_NEED = (PLAIN, Needs(edits=True, filters=True), Needs(filters=True))
"""Options of draws of drafts that together launch all kernels such draws need."""


class CudaDrafter(Drafter[SentStep], Protocol):
    """See `Drafter`. Launches on the current stream."""

    @property
    def shown(self) -> Shown:
        """Reader of the served model's hidden states."""

    def rehearse(self) -> None:
        """Launches all kernels of the drafter once, for padding rows."""

    def prepare(self, shape: StepShape) -> None:
        """Captures a shape of steps that decode."""


class DraftingSteps:
    """Steps of the drafter, in buffers of its own. Rows whose positions only the device knows are
    advanced there."""

    def __init__(
        self,
        config: EngineConfig,
        shapes: StepShapes,
        sampler: DeviceSampler,
        table: DeviceTable,
        served: StepBuffers,
        num_parts: int,
    ) -> None:
        """`served`: words of the served model's steps, of which `num_parts` may be in flight."""
        device = table.token_ids.device
        self.shapes = shapes
        self.buffers = StepBuffers(config, shapes.max_tiles, device, SENDS_A_STEP * num_parts)
        self._sampler = sampler
        self._table = table
        self._served = served
        self._shifts = torch.zeros(config.num_rows, dtype=torch.int32, device=device)
        self._num_sends = 0

    def find_shifts(self, sent: SentStep) -> None:
        """Finds how far the rows of a step are from where the host takes them to be."""
        rows = self._served.steps[:, : sent.num_rows]
        positions = self._served.words(sent.shape).positions
        find_shifts(rows, self._table.known, positions, self._shifts)

    def send(
        self, step: StepPlan, num_left: Int32Array | None = None, *, is_shifted: bool
    ) -> tuple[StepShape, int]:
        """Sends a step; returns its shape and the number of its draws, padded."""
        shape, tiles = self.shapes.of(step)
        count = int(step.samples.sum())
        num_draws = self.shapes.num_rows(count) if count else 0
        self._num_sends += 1
        step = replace(step, step=self._num_sends)
        self.buffers.send(step, shape, tiles, num_draws, NO_CHANGES, (0, 0), num_left=num_left)
        if is_shifted:
            self.shift(shape, num_draws)
        return shape, num_draws

    def shift(self, shape: StepShape, num_draws: int) -> None:
        words = self.buffers.words(shape)
        draws = self.buffers.draws[:, :num_draws]
        shift_words(
            self._shifts, StepWords(words.rows, words.positions, words.seq_lens, None, draws)
        )

    def needs(self, rows: Int32Array) -> Needs:
        """Needs of draws of these rows, without log probabilities."""
        return replace(self._sampler.needs(rows), scores=False)


def drafting_step(
    rows: Int32Array, starts: Int32Array, outputs: Int32Array, samples: BoolArray
) -> StepPlan:
    """One token of each row."""
    return StepPlan(
        step=0,
        rows=rows,
        starts=starts.astype(np.int32),
        counts=np.ones(len(rows), np.int32),
        samples=samples,
        output_indices=outputs.astype(np.int32),
        holds=np.zeros(len(rows), np.bool_),
        shares=False,
    )
