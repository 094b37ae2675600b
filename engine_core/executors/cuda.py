"""Computes plans on one GPU: submit launches and never waits, retire waits for the event of its
step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks
from headwater.kernels.launch.device import upload
from headwater.kernels.rows.step_rows import store_tokens
from headwater.kernels.stage.stage_memory import StageMemory

from ..config import EngineConfig
from ..executor import DrawPlan, Int32Array, StepPlan, StepResult
from ..models.model import Model
from ..platforms.cuda import CudaPlatform
from ..ragged import places, run_lengths
from ..sampling.pooling import Pools
from ..sampling.verification import NO_TOKEN, drafts_in_place
from .device.step_shapes import StepShape, StepShapes
from .drafter.cuda_drafter import CudaDrafter
from .drafter.cuda_drafters import Drafted, Make
from .entry.device_rows import DeviceRows, knows_alone
from .entry.step_buffers import StepBuffers
from .entry.step_sender import StepSender
from .exit.cuda_prompt_scores import CudaPromptScores
from .exit.device_sampler import EVERYTHING, PLAIN, DeviceSampler, Needs, Places
from .exit.draw_buffers import DrawBuffers, held_at
from .exit.head_part import HeadPart
from .exit.in_flight_step import InFlightStep
from .model.device_model import DeviceModel
from .ranks.gpu_stage import TokenTeller, parts_of
from .ranks.stage_relay import StageRelay
from .table.device_table import DeviceTable
from .table.drafted_rows import spread_drafts, spread_draw
from .tiers.cuda_swapper import CudaSwapper


class CudaExecutor:
    """See `Executor`. The token of a decode row is read from the table on the device, where
    sampling wrote it, so a plan is launched before the tokens of the one before it are known here.

    Forward and sampling are launched apart, so that rows which need more than a plain draw gate the
    sampling alone.
    """

    copies_blocks = True
    computes_at_once = False
    prefill_seconds = 0.0
    """Depends on the model and the machine."""

    def __init__(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        kv_caches: Sequence[torch.Tensor],
        *,
        swapper: CudaSwapper | None = None,
        looks_at_all: bool = False,
        head_part: HeadPart | None = None,
        stages: StageMemory | None = None,
    ) -> None:
        """kv_caches [layers, 2, num_blocks, Hk, block_size, D] of each model whose keys and values
        a block has, the served model's first. `looks_at_all`: what drafts is shown the hidden
        states of all tokens. `head_part`: see `DeviceSampler`. `stages`: those before this one,
        which are told what is sampled."""
        self.swapper = swapper
        self._config = config
        device = platform.device
        self._device = device
        self.can_draft = config.max_draft_tokens > 0
        num_rows = config.num_rows
        num_positions = config.max_positions
        self._table = DeviceTable(config, device)
        # Written by the device; one part for each step and draw that may be in flight.
        num_parts = parts_of(config)
        self._shapes = StepShapes(config, platform, looks_at_all=looks_at_all)
        self._buffers = StepBuffers(config, self._shapes.max_tiles, device, num_parts)
        self._sender = StepSender(self._table, self._buffers, self._shapes, device)
        self._planes = [as_planes(each) for each in kv_caches]
        self._model = DeviceModel(
            decoder, platform, config, kv_caches[0], self._table, self._buffers, self._shapes
        )
        self._graphs = self._model.graphs
        self._sampler = DeviceSampler(
            decoder.lm_head, num_rows, num_positions, decoder.dtype, device, num_parts, head_part
        )
        self._pools = Pools()
        self._prompt_scores = CudaPromptScores(decoder, self._table, num_rows, head_part)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._in_flight: deque[InFlightStep] = deque()
        self._draw_buffers = DrawBuffers(config, decoder.config.vocab_size, device)
        self._results = torch.zeros(num_parts, num_positions, dtype=torch.int32, pin_memory=True)
        self._device_rows = DeviceRows(config, self._table, self._buffers, num_parts)
        self._teller = None if stages is None else TokenTeller(stages, self._table)
        # A thread that waits for a step sleeps: the next step is in flight, so the device need not
        # wait for it.
        self._done = [torch.cuda.Event(blocking=True) for _ in range(num_parts)]  # type: ignore[no-untyped-call]  # torch ships it so
        # Hidden states after which a step samples, where they are not all of them.
        self._chosen = torch.zeros(
            num_positions, decoder.config.hidden_size, dtype=decoder.dtype, device=device
        )
        # Hidden states that wait for a mask: see `held_at`.
        most_held = num_rows * (config.max_draft_tokens + 1)
        self._held = torch.zeros(
            most_held, decoder.config.hidden_size, dtype=decoder.dtype, device=device
        )
        # Drafts of each table row, in the places of the tokens drawn from these states; NO_TOKEN
        # behind the last.
        self._held_drafts = np.full((num_rows, config.max_draft_tokens + 1), NO_TOKEN, np.int32)
        self._drafter: CudaDrafter | None = None
        # Weights, cache, tables and workspaces are made on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._unprepared = deque(partial(self._capture, shape) for shape in self._shapes.likely())
        self._unprepared.insert(self._shapes.num_first, partial(self._rehearse))

    def draft_by(self, make: Make) -> None:
        """Has a model or heads guess tokens in place of look-up; to be called before anything is
        launched."""
        self._drafter = make(Drafted(self._model, self._sampler, self._table, len(self._done)))
        self._model.shown = self._drafter.shown
        self._device_rows.are_guessed = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def relay_by(self, relay: StageRelay) -> None:
        """Has messages of stages on other hosts relayed; to be called before anything is launched
        for good."""
        self._model.launched = relay.note_layers
        assert self._teller is not None
        self._teller.relay = relay

    @torch.inference_mode()
    def launch_likely(self) -> None:
        """All kernels of likely steps: one layer of each shape that has some of its own, and each
        way to draw."""
        for shape in self._shapes.for_each_kernel():
            self._model.try_out(shape)
            if shape.num_ends and len(self._model.kv_cache) == 1:
                # Only in a step that looks at all tokens does the one layer compute more than the
                # ends.
                self._model.try_out(replace(shape, num_ends=0))
            if shape.is_decode:
                hidden = self._chosen[: shape.num_tokens]
                self._draw(hidden)
                self._draw_special(len(hidden), EVERYTHING, 0)
                for needs in (PLAIN, EVERYTHING):
                    self._draw_masked(len(hidden), needs)
            if self.can_draft:
                self._device_rows.draft(shape, 1)
                self._device_rows.store(self._sampler.tokens, 1, self._results)
        self._rehearse()
        # No request holds block 0.
        self._copy_blocks(np.zeros((1, 2), np.int32))
        if self._drafter is not None:
            self._drafter.launch_likely()
        if self._teller is not None:
            self._teller.rehearse()
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
            if plan.copied_blocks.size:
                self._copy_blocks(plan.copied_blocks)
            if self._drafter is not None:
                for admitted in plan.admitted:
                    self._drafter.seat(admitted.row)
            spread = spread_drafts(plan)
            own = self._own_columns(plan)
            shape, hidden = self._launch(plan, spread, own)
            # The device is at work: what layers do not read is noted meanwhile.
            for admitted in plan.admitted:
                self._sampler.admit(admitted)
                self._pools.admit(admitted)
                self._prompt_scores.admit(admitted)
            in_flight = self._in_flight_step(plan.step, int(spread.samples.sum()))
            if plan.num_drafts is not None and plan.draft_ids is not None:
                self._held_drafts[
                    np.repeat(plan.rows, plan.num_drafts), places(plan.num_drafts)
                ] = plan.draft_ids
            if own is not None:
                in_flight.own = self._device_rows.gains(plan, self._part(plan.step))
            elif plan.num_drafts is not None and plan.draft_ids is not None:
                in_flight.num_drafts = plan.num_drafts[plan.samples]
                sampled = np.repeat(plan.samples, plan.num_drafts)
                in_flight.drafts = drafts_in_place(in_flight.num_drafts, plan.draft_ids[sampled])
            self._take(
                spread, in_flight, shape, hidden, num_own_rows=0 if own is None else own.shape[1]
            )
            if self._drafter is not None and own is not None:
                self._drafter.see(shape, self._buffers.steps[:, : own.shape[1]])
            in_flight.done.record(self._stream)
            self._graphs.capture_due()
            if self._drafter is not None:
                self._drafter.capture_due()
        self._in_flight.append(in_flight)
        return plan.step

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> int:
        with torch.cuda.stream(self._stream):
            spread = spread_draw(plan)
            in_flight = self._in_flight_step(plan.step, len(spread.rows))
            in_flight.is_draw = True
            if plan.num_drafts is not None:
                in_flight.num_drafts = plan.num_drafts
                in_flight.drafts = self._held_drafts[spread.rows, spread.place]
            num_draws = self._shapes.num_rows(len(spread.rows))
            self._draw_buffers.send(
                plan.step, spread, plan.masks, num_draws, self._first_result(plan.step)
            )
            needs = self._sampler.needs(plan.rows)
            self._graphs.run_once(
                (num_draws, "masked", needs), partial(self._draw_masked, num_draws, needs)
            )
            if self._teller is not None:
                rows, positions, _ = self._draw_buffers.draws(num_draws)
                self._teller.tell(rows, positions, self._sampler.tokens[:num_draws])
            if needs.scores:
                in_flight.scores = self._sampler.scores(plan.step, spread.rows)
            in_flight.done.record(self._stream)
        self._in_flight.append(in_flight)
        return plan.step

    def _draw_masked(self, num_draws: int, needs: Needs) -> None:
        """The draw that the buffers hold."""
        places = Places(*self._draw_buffers.draws(num_draws))
        first_result = self._draw_buffers.first_result
        masks, held = self._draw_buffers.masks(num_draws)
        table = self._table
        tokens = self._sampler.draw_special(
            self._held[held], table.params, table.token_ids, places, needs, masks
        )
        where = places.rows, places.positions
        store_tokens(*where, tokens, table.token_ids, self._results, first_result)

    def _in_flight_step(self, step: int, num_sampled: int) -> InFlightStep:
        part = self._part(step)
        return InFlightStep(
            step=step,
            tokens=self._results[part],
            num_sampled=num_sampled,
            done=self._done[part],
        )

    def _part(self, step: int) -> int:
        return step % len(self._done)

    def _first_result(self, step: int) -> int:
        return self._part(step) * self._results.stride(0)

    def retire(self, handle: int) -> StepResult:
        in_flight = self._in_flight.popleft()
        assert in_flight.step == handle
        return in_flight.result()

    def is_ready(self, handle: int) -> bool:
        assert self._in_flight[0].step == handle
        return bool(self._in_flight[0].done.query())  # type: ignore[no-untyped-call]  # torch ships it so

    def warm_up(self) -> float:
        """Nothing is left to do: captured graphs have run once."""
        return 0.0

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Captures the next shape that steps are likely to have, so that no step compiles
        anything."""
        if self._unprepared:
            with torch.cuda.stream(self._stream):
                self._unprepared.popleft()()
        return bool(self._unprepared)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._in_flight.clear()
        self._draw_buffers.close()
        if self.swapper is not None:
            self.swapper.close()

    def _capture(self, shape: StepShape) -> None:
        num_draws = self._shapes.num_rows(shape.num_decodes or 1)
        self._buffers.clear(shape, num_draws)
        hidden = self._model.prepare(shape)
        if shape.is_decode:
            if self._drafter is not None and not shape.shares:
                self._drafter.prepare(shape)
            self._graphs.run_once((shape, "draw"), partial(self._draw, hidden))
            self._graphs.run_once(num_draws, partial(self._draw, self._chosen[:num_draws]))
            self._draw_buffers.clear(num_draws)
            self._graphs.run_once(
                (num_draws, "masked", PLAIN), partial(self._draw_masked, num_draws, PLAIN)
            )

    def _copy_blocks(self, pairs: Int32Array) -> None:
        """pairs [C, 2]: from, to."""
        sources, targets = (upload(np.ascontiguousarray(each), self._device) for each in pairs.T)
        for planes in self._planes:
            copy_blocks(planes, planes, sources, targets)

    def _own_columns(self, plan: StepPlan) -> Int32Array | None:
        """Columns of a plan's rows for the device where it drafts, alone knows the rows' positions,
        or tells a drafter how far they came; else None."""
        is_told = self._model.shown is not None or knows_alone(plan)
        return (
            self._device_rows.columns(plan, self._shapes.num_rows(len(plan.rows)))
            if is_told
            else None
        )

    def _launch(
        self, whole: StepPlan, plan: StepPlan, own: Int32Array | None
    ) -> tuple[StepShape, torch.Tensor]:
        """Tells the device the step, and what it changes in the table, and has it compute the
        hidden states. `plan`: the whole one with its drafts spread."""
        first_results = (
            self._first_result(plan.step),
            self._device_rows.first_gain(self._part(plan.step)),
        )
        shape, _ = self._sender.send(whole, plan, own, first_results)
        num_rows = 0 if own is None else own.shape[1]
        if self._drafter is not None:
            self._drafter.follow(
                whole, self._buffers.steps[:, :num_rows], self._buffers.words(shape).positions
            )
        if own is not None:
            self._graphs.run_once(
                (shape, "drafts", num_rows), partial(self._device_rows.draft, shape, num_rows)
            )
        return shape, self._model.hidden(shape)

    def _take(
        self,
        plan: StepPlan,
        in_flight: InFlightStep,
        shape: StepShape,
        hidden: torch.Tensor,
        *,
        num_own_rows: int,
    ) -> None:
        """Launches what the plan asks of its hidden states: scores, vectors, rows to hold,
        tokens."""
        for row in plan.prompt_logprob_rows:
            in_flight.prompt_scores[row] = self._prompt_scores.score(plan, hidden, row)
        if plan.pooled_rows:
            in_flight.vectors = self._pools.take(plan, hidden)
        if plan.holds.any():
            self._hold(plan, shape, hidden)
        if in_flight.num_sampled:
            self._sample(plan, in_flight, shape, hidden, num_own_rows)
            if self._teller is not None:
                self._tell(self._teller, self._shapes.num_rows(in_flight.num_sampled), num_own_rows)

    def _tell(self, teller: TokenTeller, num_draws: int, num_own_rows: int) -> None:
        """Tells the other stages what was sampled last."""
        if num_own_rows:
            teller.tell_ends(self._buffers.steps[0, :num_own_rows])
        else:
            rows, positions = self._buffers.draws[:2, :num_draws].unbind()
            teller.tell(rows, positions, self._sampler.tokens[:num_draws])

    def _hold(self, plan: StepPlan, shape: StepShape, hidden: torch.Tensor) -> None:
        """Keeps hidden states for a draw. Rows of the plan that are of one table row stand side by
        side."""
        rows = plan.rows[plan.holds]
        place = places(run_lengths(rows))
        where = np.stack(
            [held_at(rows, place, self._config.num_rows), shape.last_states(plan)[plan.holds]]
        )
        to, at = upload(where.astype(np.int32), self._device).long().unbind()
        self._held.index_copy_(0, to, hidden[at])

    def _sample(
        self,
        plan: StepPlan,
        in_flight: InFlightStep,
        shape: StepShape,
        hidden: torch.Tensor,
        num_own_rows: int,
    ) -> None:
        num_draws = in_flight.num_sampled
        padded_draws = self._shapes.num_rows(num_draws)
        samples_all = shape.is_decode and num_draws == len(plan.rows)
        needs = self._sampler.needs(plan.rows[plan.samples])
        if needs != PLAIN or not samples_all:
            hidden = torch.index_select(
                hidden, 0, self._buffers.draws[3, :padded_draws], out=self._chosen[:padded_draws]
            )
        if needs != PLAIN:
            launch = partial(self._draw_special, padded_draws, needs, num_own_rows)
            self._graphs.run_once((padded_draws, needs, num_own_rows), launch)
            if needs.scores:
                in_flight.scores = self._sampler.scores(plan.step, plan.rows[plan.samples])
        elif num_own_rows:
            key = shape if samples_all else padded_draws, "own", num_own_rows
            self._graphs.run_once(key, partial(self._draw_own, hidden, num_own_rows))
        elif samples_all:
            self._graphs.run_once((shape, "draw"), partial(self._draw, hidden))
        else:
            self._graphs.run_once(padded_draws, partial(self._draw, hidden))

    def _draw(self, hidden: torch.Tensor) -> None:
        rows, positions, outputs, _ = self._buffers.draws[:, : len(hidden)].unbind()
        self._store(rows, positions, self._sampler.draw(hidden, self._table.params, rows, outputs))

    def _draw_own(self, hidden: torch.Tensor, num_rows: int) -> None:
        """Draws what a step samples in which the device drafts, and counts what stands."""
        rows, _, outputs, _ = self._buffers.draws[:, : len(hidden)].unbind()
        self._device_rows.store(
            self._sampler.draw(hidden, self._table.params, rows, outputs), num_rows, self._results
        )

    def _draw_special(self, num_draws: int, needs: Needs, num_own_rows: int) -> None:
        """Draws from the hidden states that are chosen, with what the rows need."""
        places = Places(*self._buffers.draws[:3, :num_draws].unbind())
        table = self._table
        hidden = self._chosen[:num_draws]
        tokens = self._sampler.draw_special(hidden, table.params, table.token_ids, places, needs)
        if num_own_rows:
            self._device_rows.store(tokens, num_own_rows, self._results)
        else:
            self._store(places.rows, places.positions, tokens)

    def _rehearse(self) -> None:
        self._sampler.rehearse(self._table.params, self._table.token_ids)

    def _store(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        store_tokens(
            rows,
            positions,
            tokens,
            self._table.token_ids,
            self._results,
            self._buffers.first_result,
        )
