"""Computes plans on one GPU of which a pipeline stage before the last has layers. It samples
nothing: its residual stream goes to the next stage, and what is sampled comes from the last one,
into this stage's table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headwater.kernels.copy_blocks import as_planes, copy_blocks
from headwater.kernels.device import upload
from headwater.kernels.stage_memory import StageMemory
from headwater.kernels.stage_stream import receive_ends, receive_tokens

from ..config import EngineConfig
from ..executor import AdmittedRow, DrawPlan, Int32Array, StepPlan, StepResult
from ..models.model import Model
from ..platforms.cuda import CudaPlatform
from .cuda_guesser import CudaGuesser
from .cuda_guessers import Drafted, Make
from .cuda_swapper import CudaSwapper
from .device_model import DeviceModel
from .device_sampler import DeviceSampler
from .device_table import DeviceTable
from .gpu_stage import FirstStageGuesses, GuessTeller, MessageNumbers, parts_of
from .gpu_states import FirstStates, LateStates
from .head_part import HeadPart
from .own_drafts import leaves_drafts
from .own_rows import OwnRows, knows_alone
from .runner import NOTHING
from .spread import spread_drafts, spread_draw
from .stage_relay import StageRelay
from .step_buffers import StepBuffers
from .step_sender import StepSender
from .step_shapes import StepShape, StepShapes

NO_ROWS: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """A message of the last stage that is not received."""

    number: int
    rows: Int32Array
    """Rows of the table of which the message tells."""
    count: int
    """Padded, of rows or positions."""
    are_ends: bool


@dataclass(frozen=True, slots=True)
class AwaitedStates:
    """A step that heads have not read, because later stages may not have computed it."""

    rows: Int32Array
    """Rows of the table that the step computes."""


class CudaStageExecutor:
    """See `Executor`. As `CudaExecutor`, of which it has the parts before sampling. It launches
    what the last stage launches, shape for shape, since each of its streams is received there."""

    copies_blocks = True
    computes_at_once = False
    prefill_seconds = 0.0

    def __init__(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        kv_caches: Sequence[torch.Tensor],
        memory: StageMemory,
        *,
        swapper: CudaSwapper | None = None,
        head_part: HeadPart | None = None,
        states: FirstStates | None = None,
    ) -> None:
        """kv_caches, head_part: see `CudaExecutor`; here it is that of heads. `states`: where heads
        find hidden states on the first stage; None: none read any."""
        self.swapper = swapper
        self._config = config
        self._device = platform.device
        self.can_draft = config.max_draft_tokens > 0
        parts = parts_of(config)
        self._table = DeviceTable(config, self._device)
        # The next stage goes on with all tokens.
        self._shapes = StepShapes(config, platform, looks_at_all=True)
        self._buffers = StepBuffers(config, self._shapes.max_tiles, self._device, parts)
        self._sender = StepSender(self._table, self._buffers, self._shapes, self._device)
        self._planes = [as_planes(each) for each in kv_caches]
        self._model = DeviceModel(
            decoder, platform, config, kv_caches[0], self._table, self._buffers, self._shapes
        )
        self._own_rows = OwnRows(config, self._table, self._buffers, parts)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._done = [torch.cuda.Event(blocking=True) for _ in range(parts)]  # type: ignore[no-untyped-call]  # torch ships it so
        self._memory = memory
        self._most_awaited = parts
        self._numbers = MessageNumbers(memory.sizes.num_messages)
        self._awaited: deque[AwaitedTokens | AwaitedStates] = deque()
        self._decoder = decoder
        self._head_part = head_part
        self._states = states
        self._guesser: CudaGuesser | None = None
        self._sampler: DeviceSampler | None = None
        """Settings of rows and draws of the model or heads that guess on the first stage."""
        self._teller: GuessTeller | None = None
        self._late: LateStates | None = None
        # Weights, cache, tables and workspaces are made on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._unprepared: deque[Callable[[], object]] = deque(
            partial(self._prepare, shape) for shape in self._shapes.likely()
        )
        # Where the last stage rehearses its draws.
        self._unprepared.insert(self._shapes.num_first, _nothing)

    def draft_by(self, make: Make) -> None:
        """See `CudaExecutor`. What the first stage guesses it tells the others."""
        sizes = (self._config.num_rows, self._config.max_positions)
        served = self._decoder
        num_parts = len(self._done)
        part = self._head_part
        sampler = DeviceSampler(served.lm_head, *sizes, served.dtype, self._device, num_parts, part)
        self._guesser = make(Drafted(self._model, sampler, self._table, num_parts))
        self._own_rows.are_guessed = True
        self._model.shown = self._guesser.shown
        if not self._memory.before:
            self._sampler, self._teller = (
                sampler,
                GuessTeller(self._memory, self._table, self._model),
            )
        if self._states is not None:
            self._late = LateStates(self._states, self._guesser, self._model)
            self._model.shown = self._late.shown
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def relay_by(self, relay: StageRelay) -> None:
        """See `CudaExecutor`."""
        self._model.launched = relay.note_layers
        if self._teller is not None:
            self._teller.relay = relay
        elif isinstance(self._guesser, FirstStageGuesses):
            self._guesser.relay = relay

    @torch.inference_mode()
    def launch_likely(self) -> None:
        """See `CudaExecutor`."""
        for shape in self._shapes.for_each_kernel():
            self._model.try_out(shape)
            if self.can_draft:
                self._own_rows.draft(shape, 1)
        self._copy_blocks(np.zeros((1, 2), np.int32))
        for are_ends in (False, True):
            self._receive(AwaitedTokens(1, np.zeros(0, np.int32), 1, are_ends))
        if self._guesser is not None:
            self._guesser.launch_likely()
        if self._teller is not None:
            self._teller.rehearse()
        if self._late is not None:
            self._late.rehearse()
        if self.swapper is not None:
            self.swapper.rehearse()

    def prepare_first(self) -> None:
        for _ in range(self._shapes.num_first):
            self.prepare()
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> int:
        with torch.cuda.stream(self._stream):
            if self.swapper is not None:
                self.swapper.protect(self._stream, plan.written_blocks(self._config.block_size))
            self._settle(plan)
            if plan.copied_blocks.size:
                self._copy_blocks(plan.copied_blocks)
            num_own, num_draws = self._compute(plan)
            self._done[self._part(plan.step)].record(self._stream)
            self._model.graphs.capture_due()
            if self._guesser is not None:
                self._guesser.capture_due()
        if num_own and num_draws:
            self._await(plan.rows, num_own, are_ends=True)
        elif num_draws:
            self._await(plan.rows[plan.samples], num_draws, are_ends=False)
        if self._late is not None:
            self._awaited.append(AwaitedStates(plan.rows))
        return plan.step

    def _compute(self, plan: StepPlan) -> tuple[int, int]:
        """Launches what is guessed for the step, and the step. Returns the rows whose positions the
        device alone knows, and its draws, both padded."""
        guesser = self._guesser
        own = None
        for admitted in plan.admitted if guesser is not None else ():
            self._seat(admitted)
        if self._model.shown is not None or knows_alone(plan):
            # Heads are told how far each row came, as in `CudaExecutor`.
            own = self._own_rows.columns(plan, self._shapes.num_rows(len(plan.rows)))
        shape, num_draws = self._sender.send(plan, spread_drafts(plan), own)
        num_own = 0 if own is None else own.shape[1]
        if guesser is not None:
            words = self._buffers.steps[:, :num_own], self._buffers.words(shape).positions
            guesser.follow(plan, *words)
            if self._teller is not None and leaves_drafts(plan):
                self._teller.tell(plan, *words)
        if num_own:
            launch = partial(self._own_rows.draft, shape, num_own)
            self._model.graphs.run_once((shape, "drafts", num_own), launch)
        self._model.hidden(shape)
        if self._late is not None:
            self._late.note(shape, num_own)
        return num_own, num_draws

    def _seat(self, admitted: AdmittedRow) -> None:
        assert self._guesser is not None
        self._guesser.seat(admitted.row)
        if self._sampler is not None:
            self._sampler.admit(admitted)

    def _prepare(self, shape: StepShape) -> None:
        # Between requests, when the buffers hold a step of another shape.
        self._buffers.clear(shape, self._shapes.num_rows(shape.num_decodes or 1))
        self._model.prepare(shape)
        if self._guesser is not None and shape.is_decode and not shape.shares:
            self._guesser.prepare(shape)

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> int:
        with torch.cuda.stream(self._stream):
            # Many draws may follow one another. The next step would receive all that they drew
            # before its layers.
            self._receive_first(self._num_left_over(num_steps=0))
            self._done[self._part(plan.step)].record(self._stream)
        self._await(plan.rows, self._shapes.num_rows(len(spread_draw(plan).rows)), are_ends=False)
        return plan.step

    def retire(self, handle: int) -> StepResult:
        self._done[self._part(handle)].synchronize()
        return NOTHING

    def is_ready(self, handle: int) -> bool:
        return bool(self._done[self._part(handle)].query())  # type: ignore[no-untyped-call]  # torch ships it so

    def warm_up(self) -> float:
        """Nothing is left to do: captured graphs have run once."""
        return 0.0

    @torch.inference_mode()
    def prepare(self) -> bool:
        """See `CudaExecutor`."""
        if self._unprepared:
            with torch.cuda.stream(self._stream):
                self._unprepared.popleft()()
        return bool(self._unprepared)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self.swapper is not None:
            self.swapper.close()

    def _part(self, step: int) -> int:
        return step % len(self._done)

    def _await(self, rows: Int32Array, count: int, *, are_ends: bool) -> None:
        self._awaited.append(AwaitedTokens(self._numbers.next(), rows, count, are_ends))

    def _settle(self, plan: StepPlan) -> None:
        """Receives what the plan depends on, and what belongs to plans that are retired."""
        self._receive_first(max(self._num_needed(plan), self._num_left_over(num_steps=1)))

    def _receive_first(self, count: int) -> None:
        for _ in range(count):
            awaited = self._awaited.popleft()
            if isinstance(awaited, AwaitedTokens):
                self._receive(awaited)
            else:
                assert self._late is not None
                self._late.see()

    def _num_needed(self, plan: StepPlan) -> int:
        """How many come first up to the last one of rows that the plan reads or gives to others.
        Heads have to have read what there is of rows for which they guess, and of blocks that are
        copied."""
        if self._late is not None and plan.copied_blocks.size:
            return len(self._awaited)
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        guessed = (
            plan.rows[plan.num_drafts > 0]
            if plan.num_drafts is not None and leaves_drafts(plan)
            else NO_ROWS
        )
        read = {
            AwaitedTokens: np.concatenate([left, plan.rows]),
            AwaitedStates: np.concatenate([left, guessed]),
        }
        needed = (
            i + 1
            for i, each in enumerate(self._awaited)
            if np.isin(each.rows, read[type(each)]).any()
        )
        return max(needed, default=0)

    def _num_left_over(self, *, num_steps: int) -> int:
        """How many come first up to one beyond which there are as many as may be in flight, with so
        many more steps."""
        num_tokens = 0
        num_states = num_steps
        for i, awaited in enumerate(reversed(self._awaited)):
            num_tokens += isinstance(awaited, AwaitedTokens)
            num_states += isinstance(awaited, AwaitedStates)
            if num_tokens > self._most_awaited or (
                self._late is not None and num_states > self._late.most
            ):
                return len(self._awaited) - i
        return 0

    def _receive(self, awaited: AwaitedTokens) -> None:
        """Launches what waits for the message."""
        table = self._table
        if awaited.are_ends:
            receive_ends(self._memory, awaited.number, awaited.count, table.known, table.token_ids)
        else:
            receive_tokens(self._memory, awaited.number, awaited.count, table.token_ids)

    def _copy_blocks(self, pairs: Int32Array) -> None:
        """pairs [C, 2]: from, to."""
        sources, targets = (upload(np.ascontiguousarray(each), self._device) for each in pairs.T)
        for planes in self._planes:
            copy_blocks(planes, planes, sources, targets)


def _nothing() -> None:
    pass
