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
from ..models.model import LayerInputs, Model
from ..ragged import places
from ..sampling.sampler import Sampler
from ..stage_drafts import StageDrafts
from .batch import make_batch, num_sampled
from .own_drafts import at_known_positions, leaves_drafts, with_at_most
from .runner import NOTHING, Runner
from .stage_guesses import ReceivedGuesses, ShownStep, guess_places
from .stage_link import Receiver, Writer, received_states, received_tokens, send_states, send_tokens


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
class Awaited:
    """A message of the last stage: tokens that it samples for a plan, or hidden states that it
    shows of a step."""

    rows: Int32Array
    """[S] of the table."""
    is_wanted: BoolArray
    """[S] false of rows that have left since."""
    first: Int32Array | None = None
    """[S] position of each row's first token; None: of states."""
    shown: ShownStep | None = None
    """None: of tokens."""


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
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(decoder, config, kv_dtype, platform, sampler)
        self._writer = writer
        self._tokens = tokens
        self._awaited: deque[Awaited] = deque()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._settle(plan)
        plan = at_known_positions(plan, self._num_known)
        self._prepare_rows(plan)
        if self._guesser is not None:
            plan = with_at_most(plan, self._guesser.most)
            self._guess(plan, self._guesser)
        self._compute(plan)
        if plan.samples.any():
            num_positions = num_sampled(plan)[plan.samples]
            first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
            self._await_tokens(plan.rows[plan.samples], first)
        return NOTHING

    def draw(self, plan: DrawPlan) -> StepResult:
        self._await_tokens(plan.rows, plan.positions)
        return NOTHING

    def _compute(self, plan: StepPlan) -> None:
        guesser = self._guesser
        inputs = LayerInputs(() if guesser is None else guesser.layers)
        stream = self._stream(plan, inputs)
        shown = guesser.shown(inputs.states) if isinstance(guesser, ReceivedGuesses) else []
        send_states(self._writer, stream, *shown)

    def _stream(self, plan: StepPlan, inputs: LayerInputs) -> torch.Tensor:
        """The residual stream [T, H] behind this stage's layers."""
        batch = make_batch(plan, self._token_ids, self._block_ids, self._block_size).to(
            self._device
        )
        return self._decoder.forward(
            batch, self._kv_cache, inputs=inputs if inputs.layers else None
        )

    def _await_tokens(self, rows: Int32Array, first: Int32Array) -> None:
        self._awaited.append(Awaited(rows, np.ones(len(rows), np.bool_), first=first))

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

    def _take(self, awaited: Awaited) -> None:
        assert awaited.first is not None
        token_ids, num_tokens = received_tokens(self._tokens.receive())
        counts = num_tokens * awaited.is_wanted
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = places(counts)
        where = (
            torch.from_numpy(awaited.rows[rows]).long(),
            torch.from_numpy(awaited.first[rows] + columns).long(),
        )
        self._token_ids[where] = torch.from_numpy(token_ids[rows, columns])
        kept = awaited.is_wanted
        self._num_known[awaited.rows[kept]] = (awaited.first + num_tokens)[kept]


class FirstStageRunner(StageRunner):
    """A `StageRunner` that guesses, from its own tables. It hands its guesses on before the stream
    of the step that verifies them, and shows heads the hidden states that come back from the last
    stage."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        writer: Writer,
        tokens: Receiver,
        drafts: StageDrafts,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler` draws guesses."""
        super().__init__(decoder, config, kv_dtype, platform, writer, tokens, sampler)
        self._drafts = drafts
        self._most_awaited = 3 * config.async_depth
        first_elsewhere = decoder.config.num_layers
        self._own_layers = tuple(layer for layer in drafts.layers if layer < first_elsewhere)

    @torch.inference_mode()
    def settle_all(self) -> None:
        """Waits until the last stage has shown all that it was told to compute."""
        while self._awaited:
            self._take(self._awaited.popleft())

    def _prepare_rows(self, plan: StepPlan) -> None:
        # A copied block has what heads have read of it.
        if len(plan.copied_blocks) and self._drafts.reads_states:
            self.settle_all()
        super()._prepare_rows(plan)

    def _compute(self, plan: StepPlan) -> None:
        if leaves_drafts(plan):
            assert plan.num_drafts is not None
            ends = plan.starts + plan.counts - plan.num_drafts
            guesses = self._token_ids[guess_places(plan.rows, ends, plan.num_drafts)]
            self._writer.write(guesses.numpy().tobytes())
        inputs = LayerInputs(self._own_layers)
        send_states(self._writer, self._stream(plan, inputs))
        if self._drafts.reads_states:
            shown = ShownStep(plan, inputs.states)
            self._awaited.append(Awaited(plan.rows, np.ones(len(plan.rows), np.bool_), shown=shown))

    def _settle(self, plan: StepPlan) -> None:
        if not self._drafts.reads_states:
            return super()._settle(plan)
        # Heads read a row's part of the embedding together with other ranks: all take a message at
        # the same time, whether it has come or not. Those that are left over are of steps that have
        # retired.
        num_needed = max(self._num_needed(plan), len(self._awaited) - self._most_awaited)
        for _ in range(num_needed):
            self._take(self._awaited.popleft())

    def _take(self, awaited: Awaited) -> None:
        if awaited.shown is None:
            return super()._take(awaited)
        states = received_states(
            self._tokens, self._decoder.config.hidden_size, self._decoder.dtype
        )
        if awaited.is_wanted.any():
            assert self._guesser is not None
            self._guesser.see(awaited.shown.computed(self._drafts, states, awaited.is_wanted))
