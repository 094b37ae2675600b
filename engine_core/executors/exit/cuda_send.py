"""The end of a pipeline stage on a GPU that is not the last. Its layers send their residual stream
to the next stage; what is sampled comes from the last one, into this stage's table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.stage.stage_memory import StageMemory
from headwater.kernels.stage.stage_stream import receive_ends, receive_tokens

from ...executor import NO_RESULT, DrawPlan, Int32Array, StepPlan, StepResult
from ..device.step_shapes import StepShape, StepShapes
from ..entry.cuda_entry import SentStep
from ..table.by_position import draw_by_position
from ..table.device_table import DeviceTable
from .token_messages import MessageNumbers, TokenChannel, words_of_ends, words_of_tokens


@dataclass(frozen=True, slots=True)
class AwaitedTokens:
    """A message of the last stage that is not received."""

    number: int
    rows: Int32Array
    """Rows of the table whose tokens the message has."""
    count: int
    """Padded, of rows or positions."""
    are_ends: bool


class CudaSend:
    """See `Exit`. Streams and tokens are received as the last stage sends them, launch for
    launch."""

    def __init__(
        self,
        memory: StageMemory,
        table: DeviceTable,
        shapes: StepShapes,
        num_parts: int,
        channel: TokenChannel,
    ) -> None:
        """`num_parts`: most plans in flight. `channel`: from the last stage, if that is on another
        host."""
        self._memory = memory
        self._channel = channel
        self._table = table
        self._shapes = shapes
        self._most_awaited = num_parts
        self._numbers = MessageNumbers(memory.sizes.num_messages)
        self._awaited: deque[AwaitedTokens] = deque()

    def precede(self, plan: StepPlan) -> None:
        """Receives the messages that the plan depends on, and those of retired plans."""
        self._receive_first(max(self._num_needed(plan), self._num_left_over()))

    def give(self, sent: SentStep, hidden: torch.Tensor) -> Callable[[], StepResult]:
        plan = sent.plan
        if sent.num_rows and sent.num_draws:
            self._await(plan.rows, sent.num_rows, are_ends=True)
        elif sent.num_draws:
            self._await(plan.rows[plan.samples], sent.num_draws, are_ends=False)
        return _nothing

    def draw(self, plan: DrawPlan) -> Callable[[], StepResult]:
        # Without this, after many draws the next step would receive all of their messages before
        # its layers.
        self._receive_first(self._num_left_over())
        num_draws = self._shapes.num_rows(len(draw_by_position(plan).rows))
        self._await(plan.rows, num_draws, are_ends=False)
        return _nothing

    def rehearse(self) -> None:
        """Launches what receives either kind of message."""
        for are_ends in (False, True):
            self._receive(AwaitedTokens(1, np.zeros(0, np.int32), 1, are_ends))

    def rehearse_draws(self) -> None:
        pass

    def prepare(self, shape: StepShape, hidden: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        pass

    def _await(self, rows: Int32Array, count: int, *, are_ends: bool) -> None:
        self._awaited.append(AwaitedTokens(self._numbers.next(), rows, count, are_ends))

    def _receive_first(self, count: int) -> None:
        for _ in range(count):
            awaited = self._awaited.popleft()
            words_of = words_of_ends if awaited.are_ends else words_of_tokens
            self._channel.receive(awaited.number, words_of(awaited.count))
            self._receive(awaited)

    def _num_needed(self, plan: StepPlan) -> int:
        """Number of messages up to the last one for rows that the plan reads or releases."""
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        read = np.concatenate([left, plan.rows])
        needed = (i + 1 for i, each in enumerate(self._awaited) if np.isin(each.rows, read).any())
        return max(needed, default=0)

    def _num_left_over(self) -> int:
        """Number of message buffers beyond the plans that may be in flight."""
        return max(len(self._awaited) - self._most_awaited, 0)

    def _receive(self, awaited: AwaitedTokens) -> None:
        """Launches what waits for the message."""
        table = self._table
        if awaited.are_ends:
            receive_ends(self._memory, awaited.number, awaited.count, table.known, table.token_ids)
        else:
            receive_tokens(self._memory, awaited.number, awaited.count, table.token_ids)


def _nothing() -> StepResult:
    return NO_RESULT
