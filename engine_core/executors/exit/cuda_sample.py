"""Sampling on a GPU: from the hidden states of a step to tokens in the request table. Forward and
sampling are launched apart, so that rows which need more than a plain draw gate the sampling
alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from headwater.kernels.rows.step_rows import store_tokens

from ...executor import DrawPlan, StepPlan
from ...models.model import Model, score_head_of
from ...sampling.pooling import Pools
from ...sampling.verification import drafts_in_place, positions_of
from ..device.cuda_graphs import Graphs
from ..device.step_shapes import StepShape, StepShapes
from ..entry.cuda_entry import SentStep
from ..entry.device_rows import DeviceRows
from ..entry.result_memory import ResultMemory
from ..entry.step_buffers import StepBuffers
from ..table.by_position import draw_by_position
from ..table.device_table import DeviceTable
from .cuda_prompt_scores import CudaPromptScores
from .device_sampler import EVERYTHING, PLAIN, DeviceSampler, Needs, Places
from .held_states import HeldStates
from .in_flight_step import Gains, InFlightStep, KnownGains
from .token_messages import NoTokenSender, TokenSender


class CudaSample:
    """See `Exit`."""

    def __init__(
        self,
        decoder: Model,
        sampler: DeviceSampler,
        prompt_scores: CudaPromptScores,
        held: HeldStates,
        *,
        table: DeviceTable,
        buffers: StepBuffers,
        shapes: StepShapes,
        rows: DeviceRows,
        results: ResultMemory,
        graphs: Graphs,
        tokens: TokenSender | NoTokenSender,
    ) -> None:
        """`table`, `buffers`, `shapes` and `rows` are those of the steps' entry. `tokens`: to other
        stages."""
        self._sampler = sampler
        self._prompt_scores = prompt_scores
        self._pools = Pools(score_head_of(decoder))
        self._held = held
        self._table = table
        self._buffers = buffers
        self._shapes = shapes
        self._rows = rows
        self._results = results
        self._graphs = graphs
        self._tokens = tokens
        # Hidden states of sampled positions, where these are not all positions.
        size = results.tokens.shape[1], decoder.config.hidden_size
        self._chosen = torch.zeros(size, dtype=decoder.dtype, device=sampler.tokens.device)

    def precede(self, plan: StepPlan) -> None:
        """Does nothing: sampled tokens are in the table already, and admitted rows are noted while
        the device computes."""

    def give(self, sent: SentStep, hidden: torch.Tensor) -> InFlightStep:
        for admitted in sent.plan.admitted:
            self._sampler.admit(admitted)
            self._pools.admit(admitted)
            self._prompt_scores.admit(admitted)
        step = self._in_flight(sent)
        plan = sent.by_position
        for row in plan.prompt_logprob_rows:
            step.prompt_scores[row] = self._prompt_scores.score(plan, hidden, row)
        if plan.pooled_rows:
            step.vectors = self._pools.take(plan, hidden)
        if plan.holds.any():
            self._held.put(plan, sent.shape, hidden)
        if step.num_sampled:
            self._sample(sent, step, hidden)
            self._send_tokens(sent)
        return step

    def draw(self, plan: DrawPlan) -> InFlightStep:
        by_position = draw_by_position(plan)
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        gains = KnownGains(num_positions, self._held.drafts(by_position))
        step = InFlightStep(self._part(plan.step), len(by_position.rows), gains)
        num_draws = self._shapes.num_rows(len(by_position.rows))
        self._held.send(plan, by_position, num_draws, self._results.firsts(plan.step)[0])
        needs = self._sampler.needs(plan.rows)
        self._graphs.run_once(
            (num_draws, "masked", needs), partial(self._draw_masked, num_draws, needs)
        )
        rows, positions, _ = self._held.draws.draws(num_draws)
        self._tokens.send(rows, positions, self._sampler.tokens[:num_draws])
        if needs.scores:
            step.scores = self._sampler.scores(plan.step, by_position.rows)
        return step

    def rehearse(self) -> None:
        """Launches each way to draw."""
        for shape in self._shapes.for_each_kernel():
            if shape.is_decode:
                self._draw(self._chosen[: shape.num_tokens])
                self._draw_special(shape.num_tokens, EVERYTHING, 0)
                for needs in (PLAIN, EVERYTHING):
                    self._draw_masked(shape.num_tokens, needs)
        self._rows.store(self._sampler.tokens, 1)
        self.rehearse_draws()
        self._tokens.rehearse()

    def rehearse_draws(self) -> None:
        """Launches the draws of rows with filters, edits and scores, of a row of padding."""
        self._sampler.rehearse(self._table.params, self._table.token_ids)

    def prepare(self, shape: StepShape, hidden: torch.Tensor) -> None:
        """Captures the draws of steps of this shape, which decode."""
        num_draws = self._shapes.num_rows(shape.num_decodes)
        self._graphs.run_once((shape, "draw"), partial(self._draw, hidden))
        self._graphs.run_once(num_draws, partial(self._draw, self._chosen[:num_draws]))
        self._held.draws.clear(num_draws)
        self._graphs.run_once(
            (num_draws, "masked", PLAIN), partial(self._draw_masked, num_draws, PLAIN)
        )

    def close(self) -> None:
        self._held.draws.close()

    def _in_flight(self, sent: SentStep) -> InFlightStep:
        self._held.note_drafts(sent.plan)
        num_sampled = int(sent.by_position.samples.sum())
        return InFlightStep(self._part(sent.plan.step), num_sampled, self._gains(sent, num_sampled))

    def _gains(self, sent: SentStep, num_sampled: int) -> Gains:
        plan = sent.plan
        if sent.num_rows:
            return self._rows.gains(plan)
        if plan.num_drafts is None or plan.draft_ids is None:
            return KnownGains.without_drafts(num_sampled)
        num_drafts = plan.num_drafts[plan.samples]
        draft_ids = plan.draft_ids[np.repeat(plan.samples, plan.num_drafts)]
        return KnownGains(num_drafts + 1, drafts_in_place(num_drafts, draft_ids))

    def _part(self, step: int) -> torch.Tensor:
        return self._results.tokens[self._results.part(step)]

    def _sample(self, sent: SentStep, step: InFlightStep, hidden: torch.Tensor) -> None:
        plan = sent.by_position
        shape = sent.shape
        num_draws = sent.num_draws
        samples_all = shape.is_decode and step.num_sampled == len(plan.rows)
        needs = self._sampler.needs(plan.rows[plan.samples])
        if needs != PLAIN or not samples_all:
            hidden = torch.index_select(
                hidden, 0, self._buffers.draws[3, :num_draws], out=self._chosen[:num_draws]
            )
        if needs != PLAIN:
            launch = partial(self._draw_special, num_draws, needs, sent.num_rows)
            self._graphs.run_once((num_draws, needs, sent.num_rows), launch)
            if needs.scores:
                step.scores = self._sampler.scores(plan.step, plan.rows[plan.samples])
        elif sent.num_rows:
            key = shape if samples_all else num_draws, "rows drawn", sent.num_rows
            self._graphs.run_once(key, partial(self._draw_rows, hidden, sent.num_rows))
        elif samples_all:
            self._graphs.run_once((shape, "draw"), partial(self._draw, hidden))
        else:
            self._graphs.run_once(num_draws, partial(self._draw, hidden))

    def _send_tokens(self, sent: SentStep) -> None:
        """Sends the other stages what was sampled last."""
        if sent.num_rows:
            self._tokens.send_ends(self._buffers.steps[0, : sent.num_rows])
        else:
            rows, positions = self._buffers.draws[:2, : sent.num_draws].unbind()
            self._tokens.send(rows, positions, self._sampler.tokens[: sent.num_draws])

    def _draw(self, hidden: torch.Tensor) -> None:
        rows, positions, outputs, _ = self._buffers.draws[:, : len(hidden)].unbind()
        tokens = self._sampler.draw(hidden, self._table.params, rows, outputs)
        self._store(rows, positions, tokens, self._buffers.first_result)

    def _draw_rows(self, hidden: torch.Tensor, num_rows: int) -> None:
        """Draws the tokens of a step in which the device drafts, and counts accepted drafts."""
        rows, _, outputs, _ = self._buffers.draws[:, : len(hidden)].unbind()
        tokens = self._sampler.draw(hidden, self._table.params, rows, outputs)
        self._rows.store(tokens, num_rows)

    def _draw_special(self, num_draws: int, needs: Needs, num_rows: int) -> None:
        """Draws from the hidden states that are chosen, with what the rows need."""
        places = Places(*self._buffers.draws[:3, :num_draws].unbind())
        table = self._table
        hidden = self._chosen[:num_draws]
        tokens = self._sampler.draw_special(hidden, table.params, table.token_ids, places, needs)
        if num_rows:
            self._rows.store(tokens, num_rows)
        else:
            self._store(places.rows, places.positions, tokens, self._buffers.first_result)

    def _draw_masked(self, num_draws: int, needs: Needs) -> None:
        """Draws from the held states and under the masks that the buffers of draws hold."""
        places = Places(*self._held.draws.draws(num_draws))
        hidden, masks = self._held.take(num_draws)
        table = self._table
        tokens = self._sampler.draw_special(
            hidden, table.params, table.token_ids, places, needs, masks
        )
        self._store(places.rows, places.positions, tokens, self._held.draws.first_result)

    def _store(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        first_result: torch.Tensor,
    ) -> None:
        store_tokens(
            rows, positions, tokens, self._table.token_ids, self._results.tokens, first_result
        )
