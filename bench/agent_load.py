"""Sessions of agents on an engine: each prompt goes on from the answer that the engine generated to
the one before it. Knows an engine and a clock; knows no device."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from headwater.engine_core.engine import Engine
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput

from .agent_sessions import SHORT, AgentLoad

FIRST_TOKEN_ID = 256
VOCAB_SIZE = 40_000
SPARE_TOKENS = 16
"""Tokens of the context that a prompt and its answer leave free."""
IDLE_SECONDS = 1e-4
"""Time that passes on a virtual clock when an engine with work has none for its device."""
TEMPERATURE = 0.6
MOST_BEGUN = 0.75
"""Largest share of its turns that a session has completed when a run begins."""


class VirtualClock:
    """A virtual clock, which advances when somebody sleeps on it."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


Clock = VirtualClock | RealClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of sessions."""

    load: AgentLoad = SHORT
    num_sessions: int = 64
    seconds: float = 240.0
    start_seconds: float = 60.0
    """Time over which the sessions begin; turns that are asked in it do not count."""
    longest_gap: float = 60.0
    first_token_seconds: float = 1.0
    token_seconds: float = 0.03
    """Limits of a turn that counts as served in time."""
    seed: int = 0


class Session:
    """One session of an agent: each prompt continues the answer to the one before."""

    def __init__(
        self, run: Run, number: int, system: list[int], max_tokens: int, *, is_begun: bool = False
    ) -> None:
        """`is_begun`: a random share of its turns is completed already."""
        self.name = f"s{number}"
        self._run = run
        # Each session has its own random numbers, so that prompts do not depend on the order in
        # which turns end.
        self._rng = np.random.default_rng((run.seed, number))
        self._max_tokens = max_tokens
        load = run.load
        first = round(load.first_prompt * self._rng.uniform(0.75, 1.25))
        if is_begun:
            first += round((load.longest - load.first_prompt) * self._rng.uniform(0, MOST_BEGUN))
        self.prompt = [*system, *self._tokens(first - len(system))]
        self.turns_left = max(1, round(load.turns.draw(self._rng)))
        self.answer_len = 0
        self.kind = ""
        """Word for what is due when the answer has ended."""
        self._gap = 0.0
        self._draw()

    def _draw(self) -> None:
        load = self._run.load
        self.answer_len = max(1, round(load.answer.draw(self._rng)))
        weights = np.array([gap.weight for gap in load.gaps])
        gap = load.gaps[int(self._rng.choice(len(weights), p=weights / weights.sum()))]
        self.kind = gap.kind
        self._gap = min(gap.seconds.draw(self._rng), self._run.longest_gap)

    def go_on(self, answer: Sequence[int]) -> float | None:
        """Ends a turn; returns the seconds until the next one, None where there is none."""
        self.turns_left -= 1
        added = round(self._run.load.added * self._rng.uniform(0.5, 1.5))
        self.prompt += [*answer, *self._tokens(max(1, added - len(answer)))]
        gap = self._gap
        self._draw()
        fits = len(self.prompt) + self.answer_len + SPARE_TOKENS <= self._max_tokens
        return gap if self.turns_left and fits else None

    def _tokens(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(FIRST_TOKEN_ID, VOCAB_SIZE, max(1, num_tokens)).tolist()
        return ids


@dataclass(slots=True)
class AnsweredTurn:
    """A turn, and the times at which its tokens came."""

    session: Session
    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    answer: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_hits: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.first_at - self.asked_at

    @property
    def token_seconds(self) -> float:
        return (self.last_at - self.first_at) / max(1, len(self.answer) - 1)


class Sessions:
    """The sessions of a run on an engine."""

    def __init__(self, run: Run, engine: Engine, clock: Clock, max_tokens: int) -> None:
        self.ended: list[AnsweredTurn] = []
        """Turns that were answered, in order."""
        self._run = run
        self._engine = engine
        self._clock = clock
        self._max_tokens = max_tokens
        rng = np.random.default_rng(run.seed)
        self._system: list[int] = rng.integers(FIRST_TOKEN_ID, VOCAB_SIZE, run.load.system).tolist()
        self._numbers = count()
        self._keys = count()
        self._due: list[tuple[float, int, Session]] = []
        """Sessions with the time of their next turn."""
        self._asked: dict[int, AnsweredTurn] = {}
        self._began = clock.now()
        for _ in range(run.num_sessions):
            self._begin(self._began + rng.uniform(0, run.start_seconds), is_begun=True)

    @property
    def counted(self) -> list[AnsweredTurn]:
        """Answered turns that were asked once all sessions had begun."""
        since = self._began + self._run.start_seconds
        return [turn for turn in self.ended if turn.asked_at >= since]

    def _begin(self, at: float, *, is_begun: bool = False) -> None:
        number = next(self._numbers)
        session = Session(self._run, number, self._system, self._max_tokens, is_begun=is_begun)
        heapq.heappush(self._due, (at, number, session))

    def serve(self) -> None:
        """Answers turns until the run's time is over."""
        clock = self._clock
        end = self._began + self._run.seconds
        while (now := clock.now()) < end:
            while self._due and self._due[0][0] <= now:
                at, _, session = heapq.heappop(self._due)
                self._ask(session, at)
            if not self._engine.has_work():
                clock.sleep(min(end, self._due[0][0]) - now)
                continue
            output = self._engine.step()
            if output is not None:
                self._take(output)
            elif isinstance(clock, VirtualClock) and clock.now() == now:
                clock.sleep(IDLE_SECONDS)
        for key in list(self._asked):
            self._engine.cancel(key)
        while self._engine.has_work():
            self._engine.step()
            clock.sleep(0.0)

    def _ask(self, session: Session, at: float) -> None:
        key = next(self._keys)
        self._asked[key] = AnsweredTurn(session, at, num_prompt=len(session.prompt))
        sampling = SamplingParams(max_tokens=session.answer_len, temperature=TEMPERATURE, seed=key)
        self._engine.add(
            NewRequest(
                key=key,
                prompt_ids=session.prompt,
                output_ids=[],
                sampling=sampling,
                turn_kind=session.kind,
                session=session.name,
            )
        )

    def _take(self, output: StepOutput) -> None:
        now = self._clock.now()
        for started in output.starts:
            if started.key in self._asked:
                self._asked[started.key].num_hits = started.cached_tokens
        tokens = iter(output.token_ids)
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            added = [next(tokens) for _ in range(num_tokens)]
            turn = self._asked.get(key)
            if turn is None or not added:
                continue
            turn.first_at = turn.first_at or now
            turn.last_at = now
            turn.answer += added
        for finish in output.finishes:
            if (turn := self._asked.pop(finish.key, None)) is None:
                continue
            self.ended.append(turn)
            gap = turn.session.go_on(turn.answer)
            if gap is None:
                self._begin(now)
            else:
                heapq.heappush(self._due, (now + gap, finish.key, turn.session))
