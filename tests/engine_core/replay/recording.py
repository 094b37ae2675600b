"""One load through the engine's own scheduler, over an executor whose calls are recorded.

The scheduler makes plans that are legal by construction; the calls are then a stream that can be
repeated without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.request import FinishReason, NewRequest, TokenLogprobs
from headwater.engine_core.scheduling.speculation.grammar_drafts import GrammarDrafts
from headwater.engine_core.step_output import EngineLoad, MaskReport, StepOutput
from tests.engine_core.replay.calls import Call, Draw, Submit
from tests.engine_core.replay.cases import Built
from tests.engine_core.replay.features import features_of
from tests.engine_core.replay.loads import (
    MANY,
    VOCAB_SIZE,
    Load,
    Round,
    allowed,
    forced_behind,
)
from tests.engine_core.replay.random_drafts import RandomDrafts
from tests.engine_core.replay.recorded_executor import RecordedExecutor

MOST_STEPS = 5000
STEP_SECONDS = 0.01
"""Time of a step on the engine's clock, which is no real one."""


@dataclass(slots=True)
class Answer:
    """What a request got."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: str = ""
    """Digest of its pooled hidden states."""
    reason: FinishReason | None = None

    def begins(self, whole: Answer) -> bool:
        """Whether this answer, cut off by a cancel, is the beginning of another."""
        return (
            self.token_ids == whole.token_ids[: len(self.token_ids)]
            and self.logprobs == whole.logprobs[: len(self.logprobs)]
            and self.prompt_logprobs == whole.prompt_logprobs[: len(self.prompt_logprobs)]
            and self.embedding in ("", whole.embedding)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The calls of one seed, and what they gave."""

    executor: str
    case: str
    seed: int
    calls: list[Call]
    features: list[str]
    """Names of the features that the calls meet, see `features.FEATURES`."""

    @property
    def num_steps(self) -> int:
        """Steps and draws."""
        return sum(isinstance(call, Submit | Draw) for call in self.calls)


@dataclass(slots=True)
class _WantedMask:
    """The next mask of a row, and the step at which it is there."""

    key: int
    ticket: int
    index: int
    due: int
    draft_ids: list[int]


class Recording:
    """An engine that a load is given to."""

    def __init__(self, built: Built, load: Load, config: EngineConfig, *, drafts: bool) -> None:
        self.answers: dict[int, Answer] = {}
        self.num_cancelled = 0
        """Requests that were cancelled while they ran."""
        self._load = load
        self._num_steps = 0
        self._executor = RecordedExecutor(built.executor, load.seed, load.late_polls)
        self._requests: dict[int, NewRequest] = {}
        self._wanted: dict[int, _WantedMask] = {}
        """By row."""
        self._masks = built.masks
        built.clear()
        self._engine = Engine(
            config,
            self._executor,
            clock=lambda: self._num_steps * STEP_SECONDS,
            masks=built.masks,
            speculator=_speculator(built, config, load.seed) if drafts else None,
            report_masks=self._note_wanted,
        )

    @property
    def calls(self) -> list[Call]:
        return self._executor.calls

    def run(self) -> EngineLoad:
        """Returns when all requests have ended and nothing is in flight."""
        for each in self._load.rounds:
            self._run_round(each)
        for key in self._requests:
            self._engine.add_credit(key, MANY)
        for _ in range(MOST_STEPS):
            if not self._open() and not self._engine.has_work():
                load = self._engine.load()
                assert load.num_used_blocks == 0
                self._engine.close()
                return load
            self._step()
        raise AssertionError(f"seed {self._load.seed} does not end")

    def _run_round(self, each: Round) -> None:
        for new in each.adds:
            self._requests[new.key] = new
            self.answers[new.key] = Answer(list(new.output_ids))
            self._engine.add(new)
        for _ in range(each.num_steps):
            self._step()
        keys = list(self._requests)
        for number in each.cancels:
            self._cancel(keys[number % len(keys)])
        for number in each.stalls:
            self._engine.stall(keys[number % len(keys)])
        for number, tokens in each.credits:
            self._engine.add_credit(keys[number % len(keys)], tokens)

    def _cancel(self, key: int) -> None:
        answer = self.answers[key]
        has_begun = len(answer.token_ids) > len(self._requests[key].output_ids)
        self.num_cancelled += answer.reason is None and has_begun
        self._engine.cancel(key)

    def _open(self) -> list[int]:
        return [key for key, answer in self.answers.items() if answer.reason is None]

    def _step(self) -> None:
        self._num_steps += 1
        # An engine without work waits for nothing but masks.
        self._fill_masks(at_once=not self._engine.has_work())
        if (output := self._engine.step()) is not None:
            self._note(output)

    def _note(self, output: StepOutput) -> None:
        at = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            answer = self.answers[key]
            answer.token_ids += output.token_ids[at : at + count]
            answer.logprobs += [
                output.logprobs[i] for i in range(at, at + count) if i in output.logprobs
            ]
            at += count
        for part in output.prompt_logprobs:
            self.answers[part.key].prompt_logprobs += part.entries
        for key, vector in output.embeddings.items():
            self.answers[key].embedding = hashlib.sha256(vector).hexdigest()
        for finish in output.finishes:
            self.answers[finish.key].reason = finish.reason

    def _note_wanted(self, report: MaskReport) -> None:
        if (wanted := report.wanted) is None:
            return
        columns = (
            wanted.keys,
            wanted.rows,
            wanted.tickets,
            wanted.output_indices,
            wanted.draft_ids,
        )
        for key, row, ticket, index, draft_ids in zip(*columns, strict=True):
            due = self._num_steps + key % (self._load.mask_delay + 1)
            self._wanted[row] = _WantedMask(key, ticket, index, due, draft_ids)

    def _fill_masks(self, *, at_once: bool) -> None:
        """Fills masks as an engine server does: also for requests that have ended, and again what
        is there."""
        filled: list[tuple[int, int, int, int]] = []
        forced: list[tuple[int, int, int, list[int]]] = []
        for row, want in self._wanted.items():
            tokens = self.answers[want.key].token_ids
            if len(tokens) < want.index or not (at_once or want.due <= self._num_steps):
                continue
            drafts = want.draft_ids if len(tokens) == want.index else []
            for i in range(len(drafts) + 1):
                self._masks[i, row] = allowed([*tokens, *drafts[:i]])
            filled.append((row, want.ticket, len(tokens), len(drafts) + 1))
            forced.append((row, want.ticket, len(tokens), forced_behind(tokens)))
            want.index = len(tokens) + 1
            want.draft_ids = []
            want.due = self._num_steps + (want.key + want.index) % (self._load.mask_delay + 1)
        if filled:
            self._engine.masks_filled(*map(list, zip(*filled, strict=True)))
            self._engine.foresee(*map(list, zip(*forced, strict=True)))


def record(built: Built, load: Load) -> tuple[Stream, dict[int, Answer]]:
    """Runs a load. Returns its stream, and the answers by request."""
    recording = Recording(
        built, load, built.config_of(load), drafts=built.config.max_draft_tokens > 0
    )
    figures = recording.run()
    features = features_of(recording.calls)
    features |= {
        name
        for name, count in (
            ("preemptions", figures.num_preemptions),
            ("cancels of answers that have begun", recording.num_cancelled),
            ("prefix hits", figures.prefix_hits),
        )
        if count
    }
    stream = Stream(
        executor=built.place,
        case=built.case.name,
        seed=load.seed,
        calls=recording.calls,
        features=sorted(features),
    )
    return stream, recording.answers


def plain_answers(built: Built, requests: Iterable[NewRequest]) -> dict[int, Answer]:
    """The answers of requests that are served one after another, each alone: nothing is drafted,
    cached or in flight beside it."""
    answers: dict[int, Answer] = {}
    for new in requests:
        alone = replace(new, credit=MANY, forks=False)
        load = Load(
            seed=0,
            rounds=[Round([alone], 0, [], [], [])],
            limits=built.plain_limits,
            late_polls=0,
            mask_delay=0,
        )
        recording = Recording(built, load, built.config_of(load), drafts=False)
        recording.run()
        answers |= recording.answers
    return answers


def _speculator(built: Built, config: EngineConfig, seed: int) -> GrammarDrafts:
    drafts = RandomDrafts(seed, config, leaves_drafts=built.executor.can_draft)
    return GrammarDrafts(drafts, num_rows=config.num_rows, vocab_size=VOCAB_SIZE)
