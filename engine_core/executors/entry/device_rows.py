"""Steps of a GPU that drafts by itself, or that continues rows whose positions only the device
knows: their columns, the launches that draft and store, and what the host reads about tokens
gained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.rows.draft_rows import StepWords, draft_rows, match_scratch, store_drafted

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array, StepPlan
from ...sampling.verification import NO_TOKEN, positions_of
from ..device.step_shapes import StepShape
from ..table.device_table import DeviceTable
from .result_memory import ResultMemory
from .step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class DeviceGains:
    """Tokens and drafts that rows of a launched step gain; readable when the step is done."""

    packed: torch.Tensor
    """[R] by row of the plan, pinned: tokens, and 256 times the number of drafts."""
    samples: BoolArray
    """[R]"""
    num_positions: Int32Array
    """[S] of each row that samples, drafts that were not found included."""

    def read(self, sampled: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Sorts the tokens of all positions [P] by row. Returns them [S, n], how many of them each
        row gained, and how many drafts it had."""
        packed: Int32Array = self.packed.numpy()[: len(self.samples)][self.samples]
        # A step of prompt chunks alone samples for no row.
        is_row = np.arange(self.num_positions.max(initial=1)) < self.num_positions[:, None]
        token_ids = np.full(is_row.shape, NO_TOKEN, np.int32)
        token_ids[is_row] = sampled
        return token_ids, packed % 256, packed // 256


def knows_alone(plan: StepPlan) -> bool:
    """Whether the device alone knows where rows of the plan are, or drafts for them."""
    return plan.follows is not None or (plan.num_drafts is not None and plan.draft_ids is None)


class DeviceRows:
    def __init__(
        self,
        config: EngineConfig,
        table: DeviceTable,
        buffers: StepBuffers,
        results: ResultMemory,
        *,
        are_drafted: bool,
    ) -> None:
        """`are_drafted`: a model or heads have written the drafts before; otherwise they are looked
        up."""
        self._are_drafted = are_drafted
        device = buffers.steps.device
        self._table = table
        self._buffers = buffers
        self._most_rows = config.max_num_seqs
        self._scratch = match_scratch(config.max_num_seqs, device)
        self._num_drafts = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=device)
        self._results = results

    def gains(self, plan: StepPlan) -> DeviceGains:
        num_positions = positions_of(plan.num_drafts, len(plan.rows))[plan.samples]
        gains = self._results.gains[self._results.part(plan.step)]
        return DeviceGains(gains, plan.samples, num_positions)

    def columns(self, plan: StepPlan, num_rows: int) -> Int32Array:
        """The rows of a plan as `draft_rows` reads them, [5, padded]."""
        columns = np.zeros((5, min(num_rows, self._most_rows)), np.int32)
        columns[[0, 4]] = -1
        count = len(plan.rows)
        most = positions_of(plan.num_drafts, len(plan.rows)) - 1
        # Tokens are ordered by row: one token of a decoding row, the tokens of a chunk, and drafts.
        num_sampled = (most + 1) * plan.samples
        columns[0, :count] = plan.rows
        columns[2, :count] = most
        columns[1, :count] = np.cumsum(plan.counts) - plan.counts
        if plan.follows is not None:
            columns[3, :count] = plan.follows
        columns[4, :count] = np.where(plan.samples, np.cumsum(num_sampled) - num_sampled, -1)
        return columns

    def draft(self, shape: StepShape, num_rows: int) -> None:
        """Launches what precedes the forward pass of the step in the buffers, which has this
        shape."""
        words = self._buffers.words(shape)
        draft_rows(
            self._buffers.steps[:, :num_rows],
            self._table.known,
            self._table.token_ids,
            StepWords(
                words.rows,
                words.positions,
                words.seq_lens,
                words.end_lens if shape.num_ends else None,
                self._buffers.draws,
            ),
            self._scratch,
            self._num_drafts,
            are_there=self._are_drafted,
        )

    def store(self, token_ids: torch.Tensor, num_rows: int) -> None:
        """Launches what follows the draws of that step."""
        store_drafted(
            self._buffers.steps[:, :num_rows],
            self._table.known,
            self._table.token_ids,
            self._buffers.draws,
            self._num_drafts,
            token_ids,
            self._results.tokens,
            self._results.gains,
            self._buffers.first_results,
        )
