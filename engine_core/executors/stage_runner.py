"""Runners of pipeline stages: layers of a model whose other layers are other ranks' own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..config import EngineConfig
from ..executor import BoolArray, DrawPlan, Int32Array, StepPlan, StepResult
from ..layers.platform import Platform
from ..models.model import Model
from ..ragged import places
from ..ring import RingWriter
from ..sampling.sampler import Sampler
from .batch import make_batch, num_sampled
from .own_drafts import at_known_positions
from .runner import NOTHING, Runner
from .stage_link import Receiver, received_tokens, send_stream, send_tokens


@dataclass(frozen=True, slots=True)
class GuessLinks:
    """How guesses of the first stage's draft model reach the others: before the stream of the step that verifies
    them."""

    stream_in: Receiver | None
    """None: this is the first stage, which guesses."""
    stream_out: RingWriter | None
    """None: this is the last stage."""

    def receive(self) -> Int32Array:
        """Waits for the stage before. Raises `PeerGone`."""
        assert self.stream_in is not None
        message = self.stream_in.receive()
        self.send(message)
        return np.frombuffer(message, np.int32)

    def send(self, message: bytes) -> None:
        if self.stream_out is not None:
            self.stream_out.write(message)


def leaves_drafts(plan: StepPlan) -> bool:
    """Whether the executor guesses for any row."""
    return plan.num_drafts is not None and plan.draft_ids is None and bool(plan.num_drafts.any())


class LastStageRunner(Runner):
    """A runner that says what it sampled to the stages before it."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        writers: Sequence[RingWriter],
        sampler: Sampler | None = None,
        guesses: GuessLinks | None = None,
    ) -> None:
        """`guesses`: how those of the first stage come; None: nothing drafts there."""
        super().__init__(decoder, config, kv_dtype, platform, sampler)
        self._writers, self._guesses = writers, guesses

    @property
    def can_draft(self) -> bool:
        return self._guesses is not None

    def run(self, plan: StepPlan) -> StepResult:
        if self._guesses is not None and leaves_drafts(plan):
            assert plan.num_drafts is not None
            result = super().run(replace(plan, draft_ids=self._guesses.receive()))
            result = replace(result, num_drafts=plan.num_drafts[plan.samples])
        else:
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
    """Tokens that the last stage samples for a plan."""

    rows: Int32Array
    """[S] of the table."""
    first: Int32Array
    """[S] position of each row's first token."""
    is_wanted: BoolArray
    """[S] false of rows that have left since."""


class StageRunner(Runner):
    """A runner of layers before the last stage's. It samples nothing: the hidden states that it computes go to the next
    stage, and what is sampled after them comes from the last one. A row is computed again when its token is there;
    other rows need not wait for it."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        writer: RingWriter,
        tokens: Receiver,
        sampler: Sampler | None = None,
        guesses: GuessLinks | None = None,
    ) -> None:
        """`guesses`: how those of the first stage go on; None: nothing drafts there. `sampler` draws them."""
        super().__init__(decoder, config, kv_dtype, platform, sampler)
        self._writer, self._tokens, self._guesses = writer, tokens, guesses
        self._awaited: deque[AwaitedTokens] = deque()

    @property
    def can_draft(self) -> bool:
        return self._guesses is not None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._settle(plan)
        plan = at_known_positions(plan, self._num_known)
        self._prepare_rows(plan)
        self._exchange_guesses(plan)
        batch = make_batch(plan, self._token_ids, self._block_ids, self._block_size).to(self._device)
        send_stream(self._writer, self._decoder.forward(batch, self._kv_cache))
        if plan.samples.any():
            num_positions = num_sampled(plan)[plan.samples]
            first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
            self._await(plan.rows[plan.samples], first)
        return NOTHING

    def draw(self, plan: DrawPlan) -> StepResult:
        self._await(plan.rows, plan.positions)
        return NOTHING

    def _exchange_guesses(self, plan: StepPlan) -> None:
        """The first stage guesses, and what it guessed goes to the last one."""
        if self._guesser is not None:
            self._guess(plan, self._guesser)
        if self._guesses is None or not leaves_drafts(plan):
            return
        if self._guesser is None:
            self._guesses.receive()
        else:
            self._guesses.send(self._guessed(plan).tobytes())

    def _guessed(self, plan: StepPlan) -> Int32Array:
        """Token ids in the table behind the known tokens of the plan, int32 [sum of num_drafts]."""
        assert plan.num_drafts is not None
        counts, ends = plan.num_drafts, plan.starts + plan.counts
        rows, at = np.repeat(plan.rows, counts), np.repeat(ends - counts, counts) + places(counts)
        token_ids: Int32Array = self._token_ids[torch.from_numpy(rows).long(), torch.from_numpy(at).long()].numpy()
        return token_ids

    def _await(self, rows: Int32Array, first: Int32Array) -> None:
        self._awaited.append(AwaitedTokens(rows, first, np.ones(len(rows), np.bool_)))

    def _settle(self, plan: StepPlan) -> None:
        """Waits for the tokens that the plan reads, and takes what has come of others."""
        left = np.array([*plan.released, *(admitted.row for admitted in plan.admitted)], np.int32)
        num_needed = 0
        for i, awaited in enumerate(self._awaited):
            awaited.is_wanted &= ~np.isin(awaited.rows, left)
            if np.isin(awaited.rows[awaited.is_wanted], plan.rows).any():
                num_needed = i + 1
        while self._awaited and (num_needed > 0 or self._tokens.has_message()):
            self._take(self._awaited.popleft())
            num_needed -= 1

    def _take(self, awaited: AwaitedTokens) -> None:
        token_ids, num_tokens = received_tokens(self._tokens.receive())
        counts = num_tokens * awaited.is_wanted
        rows, columns = np.repeat(np.arange(len(counts)), counts), places(counts)
        where = torch.from_numpy(awaited.rows[rows]).long(), torch.from_numpy(awaited.first[rows] + columns).long()
        self._token_ids[where] = torch.from_numpy(token_ids[rows, columns])
        kept = awaited.is_wanted
        self._num_known[awaited.rows[kept]] = (awaited.first + num_tokens)[kept]
