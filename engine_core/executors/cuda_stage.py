"""Computes plans on one GPU of which a pipeline stage before the last has layers. It samples
nothing: its residual stream goes to the next stage, and what is sampled comes from the last one,
into this stage's table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks
from headwater.kernels.launch.device import upload
from headwater.kernels.stage.stage_memory import StageMemory
from headwater.kernels.stage.stage_stream import receive_ends, receive_tokens

from ..config import EngineConfig
from ..executor import DrawPlan, Int32Array, StepPlan, StepResult
from ..models.model import Model
from ..platforms.cuda import CudaPlatform
from .device.step_shapes import StepShape, StepShapes
from .entry.device_rows import DeviceRows, knows_alone
from .entry.step_buffers import StepBuffers
from .entry.step_sender import StepSender
from .model.device_model import DeviceModel
from .ranks.gpu_stage import MessageNumbers, parts_of
from .ranks.stage_relay import StageRelay
from .runner import NOTHING
from .table.device_table import DeviceTable
from .table.drafted_rows import spread_drafts, spread_draw
from .tiers.cuda_swapper import CudaSwapper


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """A message of the last stage that is not received."""

    number: int
    rows: Int32Array
    """Rows of the table of which the message tells."""
    count: int
    """Padded, of rows or positions."""
    are_ends: bool


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
        kv_cache: torch.Tensor,
        memory: StageMemory,
        *,
        swapper: CudaSwapper | None = None,
    ) -> None:
        """kv_cache [layers, 2, num_blocks, Hk, block_size, D] of this stage's layers."""
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
        self._planes = as_planes(kv_cache)
        self._model = DeviceModel(
            decoder, platform, config, kv_cache, self._table, self._buffers, self._shapes
        )
        self._device_rows = DeviceRows(config, self._table, self._buffers, parts)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._done = [torch.cuda.Event(blocking=True) for _ in range(parts)]  # type: ignore[no-untyped-call]  # torch ships it so
        self._memory = memory
        self._most_awaited = parts
        self._numbers = MessageNumbers(memory.sizes.num_messages)
        self._awaited: deque[AwaitedTokens] = deque()
        # Weights, cache, tables and workspaces are made on the stream that is current here.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._unprepared: deque[Callable[[], object]] = deque(
            partial(self._prepare, shape) for shape in self._shapes.likely()
        )
        # Where the last stage rehearses its draws.
        self._unprepared.insert(self._shapes.num_first, _nothing)

    def relay_by(self, relay: StageRelay) -> None:
        """See `CudaExecutor`."""
        self._model.launched = relay.note_layers

    @torch.inference_mode()
    def launch_likely(self) -> None:
        """See `CudaExecutor`."""
        for shape in self._shapes.for_each_kernel():
            self._model.try_out(shape)
            if self.can_draft:
                self._device_rows.draft(shape, 1)
        self._copy_blocks(np.zeros((1, 2), np.int32))
        for are_ends in (False, True):
            self._receive(AwaitedTokens(1, np.zeros(0, np.int32), 1, are_ends))
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
        if num_own and num_draws:
            self._await(plan.rows, num_own, are_ends=True)
        elif num_draws:
            self._await(plan.rows[plan.samples], num_draws, are_ends=False)
        return plan.step

    def _compute(self, plan: StepPlan) -> tuple[int, int]:
        """Launches what is looked up for the step, and the step. Returns the rows whose positions the
        device alone knows, and its draws, both padded."""
        own = None
        if knows_alone(plan):
            own = self._device_rows.columns(plan, self._shapes.num_rows(len(plan.rows)))
        shape, num_draws = self._sender.send(plan, spread_drafts(plan), own)
        num_own = 0 if own is None else own.shape[1]
        if num_own:
            launch = partial(self._device_rows.draft, shape, num_own)
            self._model.graphs.run_once((shape, "drafts", num_own), launch)
        self._model.hidden(shape)
        return num_own, num_draws

    def _prepare(self, shape: StepShape) -> None:
        # Between requests, when the buffers hold a step of another shape.
        self._buffers.clear(shape, self._shapes.num_rows(shape.num_decodes or 1))
        self._model.prepare(shape)

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> int:
        with torch.cuda.stream(self._stream):
            # Many draws may follow one another. The next step would receive all that they drew
            # before its layers.
            self._receive_first(self._num_left_over())
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
        self._receive_first(max(self._num_needed(plan), self._num_left_over()))

    def _receive_first(self, count: int) -> None:
        for _ in range(count):
            self._receive(self._awaited.popleft())

    def _num_needed(self, plan: StepPlan) -> int:
        """Number of messages up to the last one of rows that the plan reads or gives to others."""
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        read = np.concatenate([left, plan.rows])
        needed = (i + 1 for i, each in enumerate(self._awaited) if np.isin(each.rows, read).any())
        return max(needed, default=0)

    def _num_left_over(self) -> int:
        """Number of messages beyond those of plans that may be in flight."""
        return max(len(self._awaited) - self._most_awaited, 0)

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
        copy_blocks(self._planes, self._planes, sources, targets)


def _nothing() -> None:
    pass
