"""End of a pipeline stage that is not the last, on a platform that computes at once. Its residual
stream is sent to the next stage; sampled tokens arrive from the last one. A row waits for its own
token only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...executor import NO_RESULT, BoolArray, DrawPlan, Int32Array, StepPlan, StepResult
from ...ragged import places
from ...sampling.verification import positions_of
from ..entry.eager_entry import EagerStep
from ..table.eager_table import EagerTable
from .stage_messages import ReceivedTokens, Receiver, Sender


@dataclass(slots=True)
class AwaitedTokens:
    """A message of the last stage: tokens that it samples for a plan."""

    rows: Int32Array
    """[S] of the table."""
    first: Int32Array
    """[S] position of each row's first token."""
    is_wanted: BoolArray
    """[S] false of rows that have left since."""
    tokens: ReceivedTokens


class EagerSend:
    """See `Exit`."""

    def __init__(
        self, table: EagerTable, stream: Sender, tokens: Receiver, most_in_flight: int
    ) -> None:
        """`most_in_flight`: plans that are not retired yet."""
        self._table = table
        self._stream = stream
        self._tokens = tokens
        self._most_in_flight = most_in_flight
        self._awaited: deque[AwaitedTokens] = deque()

    def precede(self, plan: StepPlan) -> None:
        """Waits for the tokens that the plan reads, and receives those of retired plans."""
        num_retired = len(self._awaited) - self._most_in_flight
        for _ in range(max(self._num_needed(plan), num_retired)):
            self._take(self._awaited.popleft())

    def give(self, sent: EagerStep, hidden: torch.Tensor) -> Callable[[], StepResult]:
        plan = sent.plan
        self._stream.send(hidden.contiguous())
        if plan.samples.any():
            num_positions = sent.num_sampled[plan.samples]
            first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
            self._await(plan.rows[plan.samples], first, num_positions)
        return _nothing

    def draw(self, plan: DrawPlan) -> Callable[[], StepResult]:
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        self._await(plan.rows, plan.positions, num_positions)
        return _nothing

    def close(self) -> None:
        self._awaited.clear()

    def _await(self, rows: Int32Array, first: Int32Array, num_positions: Int32Array) -> None:
        tokens = ReceivedTokens(self._tokens, num_positions)
        self._awaited.append(AwaitedTokens(rows, first, np.ones(len(rows), np.bool_), tokens))

    def _num_needed(self, plan: StepPlan) -> int:
        """Number of messages up to the last one for rows that the plan computes. Notes rows that
        leave."""
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        num_needed = 0
        for i, awaited in enumerate(self._awaited):
            awaited.is_wanted &= ~np.isin(awaited.rows, left)
            if np.isin(awaited.rows[awaited.is_wanted], plan.rows).any():
                num_needed = i + 1
        return num_needed

    def _take(self, awaited: AwaitedTokens) -> None:
        token_ids, num_tokens = awaited.tokens.take()
        counts = num_tokens * awaited.is_wanted
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = places(counts)
        table = self._table.token_ids.numpy()
        table[awaited.rows[rows], awaited.first[rows] + columns] = token_ids[rows, columns]


def _nothing() -> StepResult:
    return NO_RESULT
