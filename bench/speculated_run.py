"""Exchanges through an engine of their own over an executor that others have used, timed. Knows no
workloads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.step_output import StepOutput

from .replays.replay import Exchange
from .timed_executor import TimedExecutor

EDITS: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": dict.fromkeys(range(100, 200), 0.5),
    "bad_words": ((7,), (100, 101, 102)),
    "num_logprobs": 5,
}
"""Sampling fields that edit the logits."""
NO_EDITS: Mapping[str, Any] = MappingProxyType({})
FIRST_SEED = 1
"""Least seed. Seeds name requests to `ForcedAnswers`; 0 is that of rows which measure an executor's
steps."""


@dataclass(slots=True, kw_only=True)
class SpeculatedRun:
    """Results of the exchanges."""

    seconds: float = 0.0
    token_ids: list[list[int]] = field(default_factory=list)
    """Tokens of each answer."""
    num_steps: int = 0
    """Number of the engine's steps."""
    num_request_steps: int = 0
    """Number of steps that computed a request, over all requests."""
    num_drafted: int = 0
    num_accepted: int = 0
    decode_seconds: float = 0.0
    """Seconds from the first token of an answer to its last, over all answers."""
    engine_seconds: float = 0.0
    """Seconds of scheduling, drafting and settling."""
    launch_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def token_ms(self) -> float:
        """Milliseconds of a token of an answer, without the first one."""
        return 1000 * self.decode_seconds / max(1, self.num_tokens - len(self.token_ids))

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a request in one of its steps; steps that compute its prompt count."""
        return self.num_tokens / self.num_request_steps

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


def run_exchanges(
    executor: Executor,
    config: EngineConfig,
    speculator: Speculator | None,
    exchanges: Sequence[Exchange],
    *,
    rows: int,
    temperature: float,
    stop_token_ids: tuple[int, ...] = (),
    edits: Mapping[str, Any] = NO_EDITS,
) -> SpeculatedRun:
    """Answers the exchanges in order, `rows` of them at once, all in one namespace. An answer is as
    long as the recorded one, unless a stop id ends it."""
    timed = TimedExecutor(executor)
    engine = Engine(config, timed.as_executor, speculator=speculator)
    run = SpeculatedRun(token_ids=[[] for _ in exchanges])
    waiting = iter(enumerate(exchanges))
    began: list[float] = [0.0] * len(exchanges)
    num_left = len(exchanges)
    start = time.perf_counter()
    for _ in range(min(rows, len(exchanges))):
        engine.add(_request(*next(waiting), temperature, stop_token_ids, edits))
    while num_left:
        if (output := engine.step()) is None:
            continue
        _on_output(output, run, began, time.perf_counter())
        for _ in output.finishes:
            num_left -= 1
            if (following := next(waiting, None)) is not None:
                engine.add(_request(*following, temperature, stop_token_ids, edits))
    run.seconds = time.perf_counter() - start
    run.engine_seconds = run.seconds - timed.seconds
    run.launch_seconds = timed.launch_seconds
    run.num_steps = timed.num_steps
    while engine.has_work():
        engine.step()
    engine.close()
    return run


def _request(
    index: int,
    exchange: Exchange,
    temperature: float,
    stop_token_ids: tuple[int, ...],
    edits: Mapping[str, Any],
) -> NewRequest:
    sampling = SamplingParams(
        temperature=temperature,
        seed=FIRST_SEED + index,
        max_tokens=len(exchange.answer_ids),
        stop_token_ids=stop_token_ids,
        **edits,
    )
    return NewRequest(key=index, prompt_ids=exchange.prompt_ids, output_ids=[], sampling=sampling)


def _on_output(output: StepOutput, run: SpeculatedRun, began: list[float], now: float) -> None:
    at = 0
    for key, num_tokens in zip(output.keys, output.num_tokens, strict=True):
        if not run.token_ids[key]:
            began[key] = now
        run.token_ids[key] += output.token_ids[at : at + num_tokens]
        at += num_tokens
    for finished in output.finishes:
        run.decode_seconds += now - began[finished.key]
        if (work := finished.work) is not None:
            run.num_request_steps += work.num_steps
            run.num_drafted += work.num_draft_tokens
            run.num_accepted += work.num_accepted_tokens
