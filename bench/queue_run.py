"""Plays a load to an engine in this process, by a clock that is real or virtual, and records how
each request fared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from headwater.engine_core.engine import Engine
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput
from headwater.gateway.tenancy.answer_lengths import AnswerLengths
from headwater.gateway.tenancy.tenants import Tenant
from headwater.gateway.tenancy.virtual_time import Share, VirtualTime
from headwater.services.runtime.store import Store

from .queue_loads import MAX_ANSWER, Arrival

TTFT_GOAL = 1.0
TPOT_GOAL = 0.030
"""Goals of every request, in seconds."""
ENDPOINT = "chat"
IDLE_SECONDS = 1e-3
"""Pause of an engine that waits for something other than its device."""


class VirtualClock:
    """A clock that sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class RealClock:
    begin: float = field(default_factory=time.perf_counter)

    def __call__(self) -> float:
        return time.perf_counter() - self.begin

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


Clock = VirtualClock | RealClock


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a request fared. Times are seconds of the clock; None: not reached."""

    arrival: Arrival
    share: Share
    first_token_at: float | None = None
    ended_at: float | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    """Tokens of its answer so far."""
    is_refused: bool = False
    fcfs_seconds: float = 0.0
    """Wait in order of arrival, as the engine foresees it."""

    @property
    def ttft(self) -> float | None:
        if self.first_token_at is None:
            return None
        return self.first_token_at - self.arrival.at

    @property
    def tpot(self) -> float:
        """Mean time between tokens; 0 for an answer of one token. The answer has ended."""
        assert self.first_token_at is not None
        assert self.ended_at is not None
        seconds = self.ended_at - self.first_token_at
        return seconds / max(1, self.arrival.num_answer_tokens - 1)

    @property
    def is_good(self) -> bool:
        """Whether it met both of its goals."""
        return self.ttft is not None and self.ttft <= TTFT_GOAL and self.tpot <= TPOT_GOAL


@dataclass(slots=True)
class QueueRun:
    """Outcomes of a load, and what the engine did beside."""

    outcomes: list[Outcome]
    seconds: float
    num_preemptions: int = 0


class QueuePlayer:
    """Sends requests as a gateway would: with the virtual times of their tenants, and with the
    predicted lengths of their answers."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._fair = VirtualTime(cast(Store, None))  # alone: nothing is shared
        self._lengths = AnswerLengths()
        self._open: dict[int, Outcome] = {}

    def play(self, load: Sequence[Arrival]) -> QueueRun:
        """Plays a load to its end."""
        engine = self._engine
        clock = self._clock
        begin = clock()
        outcomes = []
        waiting = sorted(load, key=lambda each: each.at, reverse=True)
        while waiting or self._open:
            while waiting and begin + waiting[-1].at <= clock():
                outcomes.append(self._send(waiting.pop(), begin))
            if not engine.has_work():
                clock.sleep(max(0.0, begin + waiting[-1].at - clock()))
                continue
            before = clock()
            if (output := engine.step()) is not None:
                self._take(output, clock() - begin)
            elif clock() == before and not engine.has_steps_in_flight:
                clock.sleep(IDLE_SECONDS)
        seconds = clock() - begin
        while engine.has_work():
            engine.step()
        return QueueRun(outcomes, seconds, engine.load().num_preemptions)

    def _send(self, arrival: Arrival, begin: float) -> Outcome:
        tenant = Tenant(id=arrival.tenant)
        share = self._fair.request(tenant, arrival.num_prompt_tokens, arrival.num_answer_tokens)
        expected = self._lengths.predict(arrival.tenant, ENDPOINT, 1 << 20)
        self._engine.add(
            NewRequest(
                key=arrival.key,
                prompt_ids=arrival.prompt(),
                output_ids=[],
                # The engine does not know how long the answer will be.
                sampling=SamplingParams(max_tokens=MAX_ANSWER),
                tenant=arrival.tenant,
                virtual_time=share.virtual_time,
                num_expected_tokens=expected,
                age_seconds=self._clock() - begin - arrival.at,
                first_token_seconds=TTFT_GOAL,
                token_seconds=TPOT_GOAL,
            )
        )
        outcome = self._open[arrival.key] = Outcome(arrival=arrival, share=share)
        return outcome

    def _take(self, output: StepOutput, now: float) -> None:
        for start in output.starts:
            outcome = self._open[start.key]
            outcome.first_token_at = now
            outcome.num_cached_tokens = start.cached_tokens
            outcome.fcfs_seconds = start.fcfs_queue_seconds
            outcome.share.started()
        for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
            if (running := self._open.get(key)) is not None:
                running.num_tokens += num_tokens
                if running.num_tokens >= running.arrival.num_answer_tokens:
                    self._engine.cancel(key)
                    self._end(running, now)
        for finished in output.finishes:
            if finished.key in self._open:
                assert finished.reason is FinishReason.LATE, finished
                self._open[finished.key].is_refused = True
                self._end(self._open[finished.key], now)

    def _end(self, outcome: Outcome, now: float) -> None:
        del self._open[outcome.arrival.key]
        outcome.ended_at = now
        num_tokens = outcome.num_tokens
        cached = outcome.num_cached_tokens
        uncached = 0 if outcome.is_refused else outcome.arrival.num_prompt_tokens - cached
        outcome.share.ended(uncached=uncached, cached=cached, output=num_tokens)
        outcome.share.release()
        if not outcome.is_refused:
            self._lengths.add(outcome.arrival.tenant, ENDPOINT, num_tokens)
