"""Drafters on a GPU, which draft before the served model verifies: the steps they send, and how
tokens are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from headwater.kernels.rows.draft_rows import StepWords
from headwater.kernels.rows.guessed_rows import find_shifts, shift_words

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array, StepPlan
from ..device.step_shapes import StepShape, StepShapes
from ..entry.step_buffers import StepBuffers
from ..exit.device_sampler import PLAIN, DeviceSampler, Needs
from ..model.device_model import Shown
from ..table.device_table import NO_CHANGES, DeviceTable

SENDS_A_STEP = 2
PASSES = (8, 4, 2, 1)
"""Guesses behind the first, in one graph each."""
EVERY_NEED = (PLAIN, Needs(edits=True, filters=True), Needs(filters=True))
"""Needs of draws of guesses, which together launch all kernels that such draws launch."""


class CudaDrafter(Protocol):
    """Launches on the current stream, beside each step of the served model."""

    shown: Shown | None
    """Reader of the served model's hidden states; None: the drafter reads none."""

    def seat(self, row: int) -> None:
        """A request takes the row."""

    def follow(self, plan: StepPlan, steps: torch.Tensor, positions: torch.Tensor) -> None:
        """Launches the guesses that a plan leaves to the executor, once the table has the plan's
        changes: they stand in it behind what is known. `steps` and `positions` are the plan's words
        for `draft_rows`, which comes behind this."""

    def see(self, shape: StepShape, steps: torch.Tensor) -> None:
        """To be called when a step of this shape has been launched whose rows are `steps`, its
        draws stored."""

    def launch_likely(self) -> None:
        """All kernels that it launches, of rows of padding."""

    def prepare(self, shape: StepShape) -> None:
        """Captures a shape of steps that decode."""

    def capture_due(self) -> None:
        """See `Graphs.capture_due`."""


class DraftingSteps:
    """Steps of what guesses, in buffers of their own; rows whose positions the device alone knows
    are moved there."""

    def __init__(
        self,
        config: EngineConfig,
        shapes: StepShapes,
        sampler: DeviceSampler,
        table: DeviceTable,
        num_parts: int,
    ) -> None:
        """`num_parts`: steps of the served model that may be in flight."""
        device = table.token_ids.device
        self.shapes = shapes
        self.buffers = StepBuffers(config, shapes.max_tiles, device, SENDS_A_STEP * num_parts)
        self._sampler = sampler
        self._table = table
        self._shifts = torch.zeros(config.num_rows, dtype=torch.int32, device=device)
        self._num_sends = 0

    def find_shifts(self, steps: torch.Tensor, positions: torch.Tensor) -> None:
        find_shifts(steps, self._table.known, positions, self._shifts)

    def send(
        self, step: StepPlan, num_left: Int32Array | None = None, *, is_shifted: bool
    ) -> tuple[StepShape, int]:
        """Tells the device a step; returns its shape and the number of its draws, padded."""
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
