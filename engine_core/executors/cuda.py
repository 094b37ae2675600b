"""Computes plans on one GPU: submit launches and never waits, retire waits for the event of its step."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan, Int32Array, StepPlan, StepResult
from headwater.engine_core.executors.cuda_graphs import Graphs
from headwater.engine_core.executors.cuda_swapper import CudaSwapper
from headwater.engine_core.executors.device_sampler import EVERYTHING, PLAIN, DeviceSampler, Needs, Places, score
from headwater.engine_core.executors.device_table import DeviceTable
from headwater.engine_core.executors.draw_inbox import DrawInbox, held_at
from headwater.engine_core.executors.flight import Flight
from headwater.engine_core.executors.own_rows import OwnRows
from headwater.engine_core.executors.spread import spread_drafts, spread_draw
from headwater.engine_core.executors.step_inbox import StepInbox
from headwater.engine_core.executors.step_shapes import StepShape, StepShapes
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.models.model import Ends, Model
from headwater.engine_core.models.one_row import OneRow
from headwater.engine_core.platforms.cuda import DEPENDENT_ROWS, AttentionPlan, CudaPlatform
from headwater.engine_core.ragged import places, run_lengths
from headwater.engine_core.sampling.pooling import Pools
from headwater.engine_core.sampling.verification import NO_TOKEN, drafts_in_place
from headwater.kernels.device import upload
from headwater.kernels.step_rows import load_tokens, store_tokens, store_tokens_and_advance

SCORED_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""
_UNUSED: Int32Array = np.empty(0, np.int32)
"""What only a CPU reads of a batch."""


class CudaExecutor:
    """See `Executor`. The token of a decode row is read from the table on the device, where sampling wrote it, so a
    plan is launched before the tokens of the one before it are known here.

    Forward and sampling are launched apart, so that rows which need more than a plain draw gate the sampling alone.
    """

    prefill_seconds = 0.0
    """Depends on the model and the machine."""

    def __init__(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        kv_cache: torch.Tensor,
        *,
        one_row: OneRow | None = None,
        swapper: CudaSwapper | None = None,
    ) -> None:
        self.swapper = swapper
        self._decoder, self._platform, self._config, self._kv_cache = decoder, platform, config, kv_cache
        device = self._device = platform.device
        self._one_row = one_row
        # With the products for one row a token's bits depend on the step that computes it.
        self.can_draft = config.max_draft_tokens > 0 and one_row is None
        num_rows, num_positions = config.max_num_seqs, config.max_positions
        self._table = DeviceTable(config, device)
        # Written by the device; one part for each step and draw that may be in flight.
        num_parts = 2 * config.async_depth + 1
        self._sampler = DeviceSampler(decoder.lm_head, num_rows, num_positions, decoder.dtype, device, num_parts)
        self._pools = Pools()
        self._num_prompt, self._num_prompt_logprobs = np.zeros((2, num_rows), np.int32)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._flights: deque[Flight] = deque()
        self._shapes = StepShapes(config, platform)
        self._inbox = StepInbox(config, self._shapes.max_tiles, device)
        self._draw_inbox = DrawInbox(config, decoder.config.vocab_size, device)
        self._results = torch.zeros(num_parts, config.decode_steps, num_positions, dtype=torch.int32, pin_memory=True)
        self._own_rows = OwnRows(config, self._table, self._inbox, num_parts)
        # A thread that waits for a step sleeps: the next step is in flight, so the device need not wait for it.
        self._done = [torch.cuda.Event(blocking=True) for _ in range(num_parts)]  # type: ignore[no-untyped-call]  # torch ships it so
        # Hidden states after which a step samples, where they are not all of them.
        self._chosen = torch.zeros(num_positions, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
        # Those that wait for a mask: see `held_at`.
        most_held = num_rows * (config.max_draft_tokens + 1)
        self._held = torch.zeros(most_held, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
        # Of each table row, in the places of the tokens that are drawn from these; behind the last there is none.
        self._held_drafts = np.full((num_rows, config.max_draft_tokens + 1), NO_TOKEN, np.int32)
        self._graphs = Graphs()
        # Weights, cache, tables and workspaces are made on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._unprepared = deque(partial(self._capture, shape) for shape in self._shapes.likely())
        self._unprepared.insert(self._shapes.num_first, partial(self._rehearse))

    @torch.inference_mode()
    def launch_likely(self) -> None:
        """All kernels of likely steps: one layer of each shape that has some of its own, and each way to draw."""
        for shape in self._shapes.for_each_kernel():
            self._try(shape)
            if shape.is_decode:
                hidden = self._chosen[: shape.num_tokens]
                self._draw_and_advance(shape, hidden)
                self._draw(hidden)
                self._draw_special(len(hidden), EVERYTHING, 0)
                self._draw_masked(len(hidden), EVERYTHING)
            if self.can_draft:
                self._own_rows.draft(shape, 1)
                self._own_rows.store(self._sampler.tokens, 1, self._results)
        self._rehearse()
        if self.swapper is not None:
            self.swapper.rehearse()

    def prepare_first(self) -> None:
        """Captures the shapes without which no engine serves."""
        for _ in range(self._shapes.num_first):
            self.prepare()
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> int:
        with torch.cuda.stream(self._stream):
            if self.swapper is not None:
                self.swapper.protect(self._stream, plan.written_blocks(self._config.block_size))
            spread = spread_drafts(plan)
            own = self._own_columns(plan)
            shape, hidden = self._launch(spread, self._table.changes(plan), own)
            # The device is at work: what layers do not read is noted meanwhile.
            for admitted in plan.admitted:
                self._sampler.admit(admitted)
                self._pools.admit(admitted)
                self._num_prompt[admitted.row] = admitted.num_prompt_tokens
                self._num_prompt_logprobs[admitted.row] = admitted.sampling.num_prompt_logprobs or 0
            flight = self._flight(plan.step, spread.output_indices[spread.samples], plan.row_steps)
            if own is not None:
                flight.own = self._own_rows.gains(plan, self._part(plan.step))
            elif plan.num_drafts is not None and plan.draft_ids is not None:
                self._held_drafts[np.repeat(plan.rows, plan.num_drafts), places(plan.num_drafts)] = plan.draft_ids
                flight.num_drafts = plan.num_drafts[plan.samples]
                sampled = np.repeat(plan.samples, plan.num_drafts)
                flight.drafts = drafts_in_place(flight.num_drafts, plan.draft_ids[sampled])
            self._take(spread, flight, shape, hidden, num_own_rows=0 if own is None else own.shape[1])
            flight.done.record(self._stream)
            self._graphs.capture_due()
        self._flights.append(flight)
        return plan.step

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> int:
        with torch.cuda.stream(self._stream):
            spread = spread_draw(plan)
            flight = self._flight(plan.step, spread.output_indices)
            if plan.num_drafts is not None:
                flight.num_drafts, flight.drafts = plan.num_drafts, self._held_drafts[spread.rows, spread.place]
            num_draws = self._shapes.num_rows(len(spread.rows))
            self._draw_inbox.send(plan.step, spread, plan.masks, num_draws, self._first_result(plan.step))
            needs = self._sampler.needs(plan.rows)
            self._graphs.run_once((num_draws, "masked", needs), partial(self._draw_masked, num_draws, needs))
            if needs.scores:
                flight.scores = self._sampler.scores(plan.step, spread.rows)
            flight.done.record(self._stream)
        self._flights.append(flight)
        return plan.step

    def _draw_masked(self, num_draws: int, needs: Needs) -> None:
        """The draw that the inbox holds."""
        places, first_result = Places(*self._draw_inbox.draws(num_draws)), self._draw_inbox.first_result
        masks, held = self._draw_inbox.masks(num_draws)
        table = self._table
        tokens = self._sampler.draw_special(self._held[held], table.params, table.token_ids, places, needs, masks)
        where = places.rows, places.positions, places.output_indices
        store_tokens(*where, tokens, table.token_ids, self._results, first_result)

    def _flight(self, step: int, output_indices: Int32Array, row_steps: Int32Array | None = None) -> Flight:
        part, num_steps = self._part(step), 1 if row_steps is None else int(row_steps.max())
        steps = (output_indices[:, None] + np.arange(num_steps)) % self._config.decode_steps
        return Flight(step=step, tokens=self._results[part], steps=steps, row_steps=row_steps, done=self._done[part])

    def _part(self, step: int) -> int:
        return step % len(self._done)

    def _first_result(self, step: int) -> int:
        return self._part(step) * self._results.stride(0)

    def retire(self, handle: int) -> StepResult:
        flight = self._flights.popleft()
        assert flight.step == handle
        return flight.result()

    def is_ready(self, handle: int) -> bool:
        assert self._flights[0].step == handle
        return bool(self._flights[0].done.query())  # type: ignore[no-untyped-call]  # torch ships it so

    def warm_up(self) -> float:
        """What is captured has run."""
        return 0.0

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Captures the next shape that steps are likely to have, so that no step compiles anything."""
        if self._unprepared:
            with torch.cuda.stream(self._stream):
                self._unprepared.popleft()()
        return bool(self._unprepared)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._flights.clear()
        self._draw_inbox.close()
        if self.swapper is not None:
            self.swapper.close()

    def _capture(self, shape: StepShape) -> None:
        num_draws = self._shapes.num_rows(shape.num_decodes or 1)
        self._inbox.clear(shape, num_draws)
        hidden = self._graphs.prepare(shape, partial(self._forward, shape), partial(self._try, shape))
        if shape.is_decode:
            self._graphs.run_once((shape, "draw"), partial(self._draw_and_advance, shape, hidden))
            self._graphs.run_once(num_draws, partial(self._draw, self._chosen[:num_draws]))
            self._draw_inbox.clear(num_draws)
            self._graphs.run_once((num_draws, "masked", PLAIN), partial(self._draw_masked, num_draws, PLAIN))

    def _own_columns(self, plan: StepPlan) -> Int32Array | None:
        """What the device is told of a plan's rows where it drafts, or knows alone where they are."""
        if plan.follows is None and (plan.num_drafts is None or plan.draft_ids is not None):
            return None
        return self._own_rows.columns(plan, self._shapes.num_rows(len(plan.rows)))

    def _launch(self, plan: StepPlan, changes: Int32Array, own: Int32Array | None) -> tuple[StepShape, torch.Tensor]:
        """Tells the device the step, and what it changes in the table, and has it compute the hidden states."""
        shape, tiles = self._shapes.of(plan)
        num_draws = int(plan.samples.sum())
        padded_draws = self._shapes.num_rows(num_draws) if num_draws else 0
        first_results = self._first_result(plan.step), self._own_rows.first_gain(self._part(plan.step))
        sent = self._inbox.send(plan, shape, tiles, padded_draws, changes, first_results, own)
        if changes.size:
            self._table.apply(upload(changes, self._device) if sent is None else sent)
        if own is not None:
            num_rows = own.shape[1]
            self._graphs.run_once((shape, "drafts", num_rows), partial(self._own_rows.draft, shape, num_rows))
        return shape, self._hidden(shape)

    def _take(
        self, plan: StepPlan, flight: Flight, shape: StepShape, hidden: torch.Tensor, *, num_own_rows: int
    ) -> None:
        """What the plan wants of its hidden states: scores, vectors, rows to hold, tokens."""
        for row in plan.prompt_logprob_rows:
            self._score_prompt(plan, flight, hidden, row)
        if plan.pooled_rows:
            flight.vectors = self._pools.take(plan, hidden)
        if plan.holds.any():
            self._hold(plan, shape, hidden)
        if len(flight.steps):
            self._sample(plan, flight, shape, hidden, num_own_rows)

    def _hold(self, plan: StepPlan, shape: StepShape, hidden: torch.Tensor) -> None:
        """Keeps hidden states for a draw. Rows of the plan that are of one table row stand side by side."""
        rows = plan.rows[plan.holds]
        place = places(run_lengths(rows))
        where = np.stack([held_at(rows, place, self._config.max_num_seqs), shape.last_states(plan)[plan.holds]])
        to, at = upload(where.astype(np.int32), self._device).long().unbind()
        self._held.index_copy_(0, to, hidden[at])

    def _hidden(self, shape: StepShape) -> torch.Tensor:
        launch = partial(self._forward, shape)
        if shape.is_decode:
            return self._graphs.replay(shape, launch, partial(self._try, shape))
        return self._graphs.run(shape, launch) if self._shapes.recurs(shape) else launch()

    def _sample(
        self, plan: StepPlan, flight: Flight, shape: StepShape, hidden: torch.Tensor, num_own_rows: int
    ) -> None:
        num_draws = len(flight.steps)
        padded_draws = self._shapes.num_rows(num_draws)
        samples_all = shape.is_decode and num_draws == len(plan.rows)
        needs = self._sampler.needs(plan.rows[plan.samples])
        if needs != PLAIN or not samples_all:
            hidden = torch.index_select(hidden, 0, self._inbox.draws[3, :padded_draws], out=self._chosen[:padded_draws])
        if needs != PLAIN:
            launch = partial(self._draw_special, padded_draws, needs, num_own_rows)
            self._graphs.run_once((padded_draws, needs, num_own_rows), launch)
            if needs.scores:
                flight.scores = self._sampler.scores(plan.step, plan.rows[plan.samples])
        elif num_own_rows:
            key = shape if samples_all else padded_draws, "own", num_own_rows
            self._graphs.run_once(key, partial(self._draw_own, hidden, num_own_rows))
        elif samples_all:
            self._graphs.run_once((shape, "draw"), partial(self._draw_and_advance, shape, hidden))
            for _ in range(plan.num_steps - 1):
                hidden = self._hidden(shape)
                self._graphs.run_once((shape, "draw"), partial(self._draw_and_advance, shape, hidden))
        else:
            self._graphs.run_once(padded_draws, partial(self._draw, hidden))

    def _try(self, shape: StepShape) -> None:
        """Layers are alike but for the last, so two of them launch all there is."""
        self._forward(shape, num_layers=2)

    def _forward(self, shape: StepShape, num_layers: int | None = None) -> torch.Tensor:
        """Hidden states of the step that the inbox holds, [num_tokens, H] or [num_ends, H]."""
        words, table = self._inbox.words(shape), self._table
        if self._one_row is not None and shape.is_one_row:
            where = words.rows, words.positions, words.seq_lens, table.token_ids, table.block_ids
            return self._one_row.forward(*where, self._kv_cache, num_layers)
        token_ids = torch.empty(shape.num_tokens, dtype=torch.int64, device=self._device)
        slots = torch.empty(shape.num_tokens, dtype=torch.int32, device=self._device)
        block_size = self._config.block_size
        load_tokens(words.rows, words.positions, table.token_ids, table.block_ids, block_size, token_ids, slots)
        attention = AttentionPlan(
            num_decodes=shape.num_decodes,
            seq_lens=words.seq_lens,
            table_rows=words.table_rows,
            block_tables=table.block_ids,
            decode=self._platform.decode_plan(shape.num_decodes),
            windowed=self._platform.windowed_plan(shape.num_decodes),
            shares=shape.shares,
            chunk_lens=words.chunk_lens,
            chunk_rows=words.chunk_rows,
            query_starts=words.query_starts,
            tiles=words.tiles.view(-1, 2),
            dependent=shape.num_tokens <= DEPENDENT_ROWS,
        )
        self._platform.refresh(attention)
        ends = None
        if shape.num_ends:
            plan = self._platform.plan_ends(words.end_lens, words.end_rows, table.block_ids, shares=shape.shares)
            ends = Ends(words.end_tokens, plan)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=words.positions,
            slots=slots,
            starts=_UNUSED,
            counts=_UNUSED,
            block_tables=table.block_ids,
            sampled=slots[:0],
        )
        return self._decoder.forward(batch, self._kv_cache, attention, ends=ends, num_layers=num_layers)

    def _draw(self, hidden: torch.Tensor) -> None:
        rows, positions, outputs, _ = self._inbox.draws[:, : len(hidden)].unbind()
        self._store(rows, positions, outputs, self._sampler.draw(hidden, self._table.params, rows, outputs))

    def _draw_own(self, hidden: torch.Tensor, num_rows: int) -> None:
        """Draws what a step samples in which the device drafts, and counts what stands."""
        rows, _, outputs, _ = self._inbox.draws[:, : len(hidden)].unbind()
        self._own_rows.store(self._sampler.draw(hidden, self._table.params, rows, outputs), num_rows, self._results)

    def _draw_and_advance(self, shape: StepShape, hidden: torch.Tensor) -> None:
        """Of a decode step that samples every row: leaves in the inbox the step after it."""
        words, table, outputs = self._inbox.words(shape), self._table, self._inbox.draws[2, : len(hidden)]
        tokens = self._sampler.draw(hidden, table.params, words.rows, outputs)
        store_tokens_and_advance(
            words.rows,
            words.positions,
            outputs,
            tokens,
            table.token_ids,
            self._results,
            self._inbox.first_result,
            table.params,
            words.seq_lens,
        )

    def _draw_special(self, num_draws: int, needs: Needs, num_own_rows: int) -> None:
        """Draws from the hidden states that are chosen, with what the rows need."""
        places, table = Places(*self._inbox.draws[:3, :num_draws].unbind()), self._table
        hidden = self._chosen[:num_draws]
        tokens = self._sampler.draw_special(hidden, table.params, table.token_ids, places, needs)
        if num_own_rows:
            self._own_rows.store(tokens, num_own_rows, self._results)
        else:
            self._store(places.rows, places.positions, places.output_indices, tokens)

    def _rehearse(self) -> None:
        self._sampler.rehearse(self._table.params, self._table.token_ids)

    def _store(self, rows: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor, tokens: torch.Tensor) -> None:
        store_tokens(rows, positions, outputs, tokens, self._table.token_ids, self._results, self._inbox.first_result)

    def _score_prompt(self, plan: StepPlan, flight: Flight, hidden: torch.Tensor, row: int) -> None:
        i = int(np.flatnonzero(plan.rows == row)[0])
        start, first = int(plan.starts[i]), int(plan.counts[:i].sum())
        count = min(int(plan.counts[i]), int(self._num_prompt[row]) - 1 - start)
        # A copy: the row may be another's before the scores are read.
        next_ids = self._table.token_ids[row, start + 1 : start + 1 + count].clone()
        num_top = int(self._num_prompt_logprobs[row])
        parts = []
        for at in range(0, count, SCORED_AT_ONCE):
            end = min(at + SCORED_AT_ONCE, count)
            parts.append(score(self._decoder.logits(hidden[first + at : first + end]), next_ids[at:end], num_top))
        flight.prompt_scores[row] = parts, num_top
