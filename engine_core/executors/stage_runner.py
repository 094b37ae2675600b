"""Runners of pipeline stages: layers of a model whose other layers are other ranks' own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import EngineConfig
from ..executor import BoolArray, DrawPlan, Int32Array, StepPlan, StepResult
from ..layers.platform import Platform
from ..models.model import Model
from ..ragged import places
from ..sampling.sampler import Sampler
from .ranks.stage_link import Receiver, Writer, received_tokens, send_stream, send_tokens
from .runner import NOTHING, Runner
from .table.batch import make_batch, num_sampled


class LastStageRunner(Runner):
    """A runner that says what it sampled to the stages before it."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        writers: Sequence[Writer],
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(decoder, config, kv_dtype, platform, sampler)
        self._writers = writers

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if plan.samples.any():
            send_tokens(self._writers, result.token_ids, result.num_tokens)
        return result

    def draw(self, plan: DrawPlan) -> StepResult:
        result = super().draw(plan)
        send_tokens(self._writers, result.token_ids, result.num_tokens)
        return result


@dataclass(slots=True)
class AwaitedTokens:
    """A message of the last stage: tokens that it samples for a plan."""

    rows: Int32Array
    """[S] of the table."""
    first: Int32Array
    """[S] position of each row's first token."""
    is_wanted: BoolArray
    """[S] false of rows that have left since."""


class StageRunner(Runner):
    """A runner of layers before the last stage's. It samples nothing: the hidden states that it
    computes go to the next stage, and what is sampled after them comes from the last one. A row is
    computed again when its token is there; other rows need not wait for it."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        writer: Writer,
        tokens: Receiver,
    ) -> None:
        super().__init__(decoder, config, kv_dtype, platform)
        self._writer = writer
        self._tokens = tokens
        self._awaited: deque[AwaitedTokens] = deque()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._settle(plan)
        self._prepare_rows(plan)
        batch = make_batch(plan, self._token_ids, self._block_ids, self._block_size).to(
            self._device
        )
        send_stream(self._writer, self._decoder.forward(batch, self._kv_cache))
        if plan.samples.any():
            num_positions = num_sampled(plan)[plan.samples]
            first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
            self._await_tokens(plan.rows[plan.samples], first)
        return NOTHING

    def draw(self, plan: DrawPlan) -> StepResult:
        self._await_tokens(plan.rows, plan.positions)
        return NOTHING

    def _await_tokens(self, rows: Int32Array, first: Int32Array) -> None:
        self._awaited.append(AwaitedTokens(rows, first, np.ones(len(rows), np.bool_)))

    def _settle(self, plan: StepPlan) -> None:
        """Waits for the tokens that the plan reads, and takes what has come of others."""
        num_needed = self._num_needed(plan)
        while self._awaited and (num_needed > 0 or self._tokens.has_message()):
            self._take(self._awaited.popleft())
            num_needed -= 1

    def _num_needed(self, plan: StepPlan) -> int:
        """Messages of rows that the plan computes, and all before these. Notes rows that leave."""
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        num_needed = 0
        for i, awaited in enumerate(self._awaited):
            awaited.is_wanted &= ~np.isin(awaited.rows, left)
            if np.isin(awaited.rows[awaited.is_wanted], plan.rows).any():
                num_needed = i + 1
        return num_needed

    def _take(self, awaited: AwaitedTokens) -> None:
        token_ids, num_tokens = received_tokens(self._tokens.receive())
        counts = num_tokens * awaited.is_wanted
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = places(counts)
        where = (
            torch.from_numpy(awaited.rows[rows]).long(),
            torch.from_numpy(awaited.first[rows] + columns).long(),
        )
        self._token_ids[where] = torch.from_numpy(token_ids[rows, columns])
