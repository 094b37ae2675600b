"""A smaller model on a GPU that drafts what follows the known tokens of rows, before the served
model verifies them.

Its keys and values lie in the same KV blocks. It computes what it has not
seen of the rows, then one token of each a pass; all passes behind the first are one graph. Where
the host does not know how far a row came, the device moves the words of these steps, so a step is
launched before the result of the last one is known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from headwater.kernels.rows.stored_drafts import store_drafts, store_drafts_and_advance

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ...ragged import places
from ..device.step_shapes import StepShape
from ..entry.cuda_entry import SentStep
from ..exit.device_sampler import PLAIN, DeviceSampler, Needs, Places
from ..model.device_model import DeviceModel
from ..model.shown import NotShown
from ..table.device_table import DeviceTable
from .computed_positions import CATCH_UP, CatchUp, ComputedPositions
from .cuda_drafter import EVERY_NEED, PASSES, DraftingSteps, drafting_step

MOST_SPLIT = 4
"""Most skipped positions of a row that are computed as decode tokens, which takes fewer launches
than a chunk."""


def drafting_config(config: EngineConfig) -> EngineConfig:
    """The limits of steps that draft: beside what the served model computes, rows may catch up.
    Draft models have no adapters."""
    most = config.max_num_batched_tokens + config.max_num_seqs * CATCH_UP
    return replace(config, max_num_batched_tokens=most, num_adapter_ranks=0)


class CudaDraftModel:
    """See `CudaDrafter`."""

    shown = NotShown()

    def __init__(
        self,
        model: DeviceModel,
        steps: DraftingSteps,
        sampler: DeviceSampler,
        config: EngineConfig,
        table: DeviceTable,
        hidden_size: int,
    ) -> None:
        """The sampler draws as that of the served model does: with the noise of the token that is
        drafted, which makes both equal oftener than two draws of their own would be."""
        self._model = model
        self._steps = steps
        self._sampler = sampler
        self._table = table
        self._most_positions = config.max_positions
        self.most = config.max_draft_tokens
        self._kept = ComputedPositions(config.num_rows)
        size = config.max_positions, hidden_size
        self._chosen = torch.zeros(size, dtype=sampler.dtype, device=table.token_ids.device)

    def seat(self, row: int) -> None:
        self._kept.seat(row)

    def rehearse(self) -> None:
        shapes = list(self._model.shapes.for_each_kernel())
        for shape in shapes:
            self._model.rehearse(shape)
        for shape in shapes:
            if shape.is_decode:
                self._steps.buffers.clear(shape, shape.num_tokens)
                for needs in EVERY_NEED:
                    self._passes(shape, 1, needs)
        self._steps.shift(shapes[-1], 1)
        padding = self._steps.buffers.draws[:2, :1]
        store_drafts(
            padding[0],
            padding[1],
            self._sampler.tokens[:1],
            self._table.token_ids,
            self._sampler.vocab_size,
        )

    def prepare(self, shape: StepShape) -> None:
        # Rows of its own steps share no blocks and have no adapters.
        if shape.shares or shape.has_adapters:
            return
        num_draws = shape.num_decodes
        self._steps.buffers.clear(shape, num_draws)
        self._model.prepare(shape)
        self._model.graphs.run_once((num_draws, PLAIN), partial(self._draw_first, num_draws, PLAIN))
        for num_passes in PASSES:
            self._model.graphs.run_once(
                (shape, num_passes, PLAIN), partial(self._passes, shape, num_passes, PLAIN)
            )

    def draft(self, sent: SentStep) -> None:
        plan = sent.plan
        none = np.zeros(len(plan.rows), np.int32)
        num_drafts = none if plan.num_drafts is None else plan.num_drafts
        ends = plan.starts + plan.counts - num_drafts
        num_drafts = num_drafts if plan.draft_ids is None else none
        caught = self._kept.take(plan.rows, plan.starts, ends, num_drafts, plan.follows)
        if caught is None:
            return
        is_shifted = plan.follows is not None
        if is_shifted:
            self._steps.find_shifts(sent)
        rows = plan.rows[caught.index]
        outputs = plan.output_indices[caught.index]
        self._catch_up(rows, outputs, caught, is_shifted=is_shifted)
        num_left = num_drafts[caught.index] - 1
        goes_on = num_left > 0
        if goes_on.any():
            behind = caught.starts + caught.counts
            self._go_on(
                rows[goes_on],
                behind[goes_on],
                outputs[goes_on] + 1,
                num_left[goes_on],
                is_shifted=is_shifted,
            )

    def see(self, sent: SentStep, hidden: torch.Tensor) -> None:
        """Does nothing: the model computes from tokens alone."""

    def _catch_up(
        self, rows: Int32Array, outputs: Int32Array, caught: CatchUp, *, is_shifted: bool
    ) -> None:
        """Computes what the model has not seen and the first drafts."""
        shape, num_draws = self._steps.send(
            self._by_position(rows, outputs, caught), is_shifted=is_shifted
        )
        hidden = self._model.hidden(shape)
        if num_draws:
            torch.index_select(
                hidden, 0, self._steps.buffers.draws[3, :num_draws], out=self._chosen[:num_draws]
            )
            needs = self._steps.needs(rows[caught.is_drafted])
            self._model.graphs.run_once(
                (num_draws, needs), partial(self._draw_first, num_draws, needs)
            )

    def _draw_first(self, num_draws: int, needs: Needs) -> None:
        rows, positions, outputs, _ = self._steps.buffers.draws[:, :num_draws].unbind()
        tokens = self._draw(self._chosen[:num_draws], Places(rows, positions, outputs), needs)
        store_drafts(rows, positions, tokens, self._table.token_ids, self._sampler.vocab_size)

    def _go_on(
        self,
        rows: Int32Array,
        starts: Int32Array,
        outputs: Int32Array,
        num_left: Int32Array,
        *,
        is_shifted: bool,
    ) -> None:
        """Drafts num_left[i] tokens more behind the draft at starts[i]."""
        step = drafting_step(rows, starts, outputs, np.ones(len(rows), np.bool_))
        shape, _ = self._steps.send(step, num_left, is_shifted=is_shifted)
        needs = self._steps.needs(rows)
        left = int(num_left.max())
        for num_passes in PASSES:
            while left >= num_passes:
                launch = partial(self._passes, shape, num_passes, needs)
                self._model.graphs.run_once((shape, num_passes, needs), launch)
                left -= num_passes

    def _passes(self, shape: StepShape, num_passes: int, needs: Needs) -> None:
        words, table, (_, _, outputs, num_left) = (
            self._steps.buffers.words(shape),
            self._table,
            self._steps.buffers.draws,
        )
        n = shape.num_tokens
        for _ in range(num_passes):
            hidden = self._model.forward(shape)
            tokens = self._draw(hidden, Places(words.rows, words.positions, outputs[:n]), needs)
            counters = words.seq_lens, outputs[:n], num_left[:n]
            where = words.rows, words.positions
            store_drafts_and_advance(
                *where, tokens, table.token_ids, self._sampler.vocab_size, *counters
            )

    def _draw(self, hidden: torch.Tensor, places: Places, needs: Needs) -> torch.Tensor:
        if needs == PLAIN:
            return self._sampler.draw(
                hidden, self._table.params, places.rows, places.output_indices
            )
        return self._sampler.draw_special(
            hidden, self._table.params, self._table.token_ids, places, needs
        )

    def _by_position(self, rows: Int32Array, outputs: Int32Array, caught: CatchUp) -> StepPlan:
        """The step of what is caught up: few positions of a row decode, more are a chunk."""
        is_split = caught.counts <= MOST_SPLIT
        if caught.counts[is_split].sum() > self._most_positions:
            is_split = caught.counts == 1
        order = np.concatenate([np.flatnonzero(is_split), np.flatnonzero(~is_split)])
        counts = caught.counts[order]
        num_tokens = np.where(is_split[order], counts, 1)
        place = places(num_tokens)
        each = np.repeat(order, num_tokens)
        is_last = place == np.repeat(num_tokens, num_tokens) - 1
        step = drafting_step(
            rows[each],
            caught.starts[each] + place,
            outputs[each],
            caught.is_drafted[each] & is_last,
        )
        return replace(
            step, counts=np.where(is_split[each], 1, caught.counts[each]).astype(np.int32)
        )
