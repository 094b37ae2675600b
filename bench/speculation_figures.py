"""Figures of replays with speculation off and on, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .replays.replay import Exchange
from .speculated_run import SpeculatedRun

Pair = tuple[SpeculatedRun, SpeculatedRun]
"""Figures with speculation off, and on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Conditions of a measurement."""

    workload: str
    rows: int
    """Number of requests at once."""
    temperature: float
    exchanges: Sequence[Exchange]
    is_edited: bool = False
    """Whether requests have penalties, biases, bad words and log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The best run with speculation off or on; the engine's times are microseconds of a step."""

    seconds: float
    tokens_per_second: float
    token_ms: float
    """Milliseconds of a token after the first one of an answer."""
    steps: int
    tokens_per_step: float
    """Number of tokens of a request in one of its steps."""
    engine_us: float
    """Microseconds of scheduling, drafting and settling."""
    launch_us: float
    """Microseconds of launching the step on a GPU, or of the step on a CPU."""

    @classmethod
    def of(cls, run: SpeculatedRun) -> Way:
        return cls(
            seconds=round(run.seconds, 4),
            tokens_per_second=round(run.tokens_per_second, 1),
            token_ms=round(run.token_ms, 4),
            steps=run.num_steps,
            tokens_per_step=round(run.tokens_per_step, 3),
            engine_us=round(run.engine_seconds / run.num_steps * 1e6, 1),
            launch_us=round(run.launch_seconds / run.num_steps * 1e6, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    workload: str
    rows: int
    """Number of requests at once."""
    temperature: float
    is_edited: bool
    """See `Case`."""
    is_forced: bool
    requests: int
    prompt_tokens: int
    answer_tokens: int
    speedup: float
    """Tokens a second with speculation over those without, prompts being computed in both."""
    decode_speedup: float
    """Ratio of the times from an answer's first token to its last."""
    drafted: int
    accepted: int
    acceptance: float
    different_tokens: int
    """Number of places in which answers differ, over all runs; forced answers are also compared
    with the forced tokens."""
    off: Way
    on: Way
    runs: list[tuple[float, float]]
    """Seconds of each run, off and on."""

    @classmethod
    def of(
        cls, case: Case, pairs: Sequence[Pair], *, is_forced: bool, different_tokens: int
    ) -> Measurement:
        off, on = (min((pair[i] for pair in pairs), key=lambda run: run.seconds) for i in (0, 1))
        return cls(
            workload=case.workload,
            rows=case.rows,
            temperature=case.temperature,
            is_edited=case.is_edited,
            is_forced=is_forced,
            requests=len(case.exchanges),
            prompt_tokens=sum(len(each.prompt_ids) for each in case.exchanges),
            answer_tokens=on.num_tokens,
            speedup=round(on.tokens_per_second / off.tokens_per_second, 3),
            decode_speedup=round(off.token_ms / on.token_ms, 3),
            drafted=on.num_drafted,
            accepted=on.num_accepted,
            acceptance=round(on.acceptance, 3),
            different_tokens=different_tokens,
            off=Way.of(off),
            on=Way.of(on),
            runs=[(round(a.seconds, 4), round(b.seconds, 4)) for a, b in pairs],
        )


def table(rows: Sequence[Measurement]) -> Table:
    found = Table(
        *("workload", "rows", "at", "tok/s off", "on", "speed-up", "decoding"),
        *("tokens/step", "accepted", "engine µs off", "on", "differ"),
    )
    for row in rows:
        cells = (
            row.workload,
            row.rows,
            row.temperature,
            row.off.tokens_per_second,
            row.on.tokens_per_second,
        )
        more = row.speedup, row.decode_speedup, row.on.tokens_per_step, row.acceptance
        found.add_row(
            *map(str, (*cells, *more, row.off.engine_us, row.on.engine_us, row.different_tokens))
        )
    return found
