"""Made-up sessions of agents as requests in Mooncake's format, drawn from a seed.

A session is a row of turns whose prompts grow: each goes on from the one before it. Between two
turns lies a gap: the time of a tool, of a slow tool or of a person. At some turns a session starts
a group of sub-agents, whose prompts share a prefix, and waits for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from .trace_file import TraceRecord

BLOCK = 512
"""Tokens of a block, as in Mooncake's traces."""
SECONDS_PER_TOKEN = 0.012
"""Time in which an answer's token is decoded."""
QUANTILE_90 = 1.2816
"""Standard deviations between the median and the 90 % quantile of a normal distribution."""
TOOL = "tool"
PERSON = "person"
GROUP = "group"


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution."""

    median: float
    sigma: float

    @classmethod
    def of(cls, median: float, p90: float) -> Spread:
        return cls(median, math.log(p90 / median) / QUANTILE_90)

    def draw(self, rng: np.random.Generator) -> float:
        return self.median * math.exp(self.sigma * rng.standard_normal())

    def survival(self, seconds: float) -> float:
        """Share of draws above a value."""
        if seconds <= 0:
            return 1.0
        return 0.5 * math.erfc(math.log(seconds / self.median) / (self.sigma * math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class Gap:
    """A kind of pause between two turns."""

    kind: str
    """Word for what an engine may know of it: whether a tool or a person is due to answer."""
    weight: float
    seconds: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """Parameters of a set of sessions. Lengths in tokens, times in seconds."""

    num_sessions: int = 48
    arrival_seconds: float = 3600.0
    """Time over which sessions begin."""
    turns: Spread
    system: int
    """Tokens that all sessions begin with."""
    first_prompt: int
    longest: int
    """Tokens of a session's last prompt, on average."""
    answer: Spread
    gaps: tuple[Gap, ...]
    group_chance: float = 0.0
    """Chance of a turn to start a group of sub-agents."""
    group_size: Spread = Spread(7, 0.0)
    group_prefix: int = 8000
    """Tokens that the sub-agents of one group share, in addition to those of `sub_system`."""
    sub_system: int = 4000
    """Tokens that all sub-agents begin with."""
    sub_turns: Spread = Spread(4, 0.5)
    sub_added: int = 1500
    """Tokens of a sub-agent's task, and tokens that each further turn adds."""
    drops_thinking: float = 0.0
    """Share of the tokens of a turn that the template drops when the next message of a person
    comes: later tokens of the prompt change their positions."""
    tenants: tuple[str, ...] = ("",)

    @property
    def added(self) -> float:
        """Tokens that come to a prompt from one turn to the next, on average."""
        return (self.longest - self.first_prompt) / max(1.0, self.turns.median - 1)


LONG = AgentLoad(
    turns=Spread(107, 0.3),
    system=8000,
    first_prompt=16_000,
    longest=195_000,
    answer=Spread(317, 0.0),
    gaps=(
        Gap(TOOL, 0.82, Spread(1.6, 0.85)),
        Gap(TOOL, 0.15, Spread(22, 0.9)),
        Gap(PERSON, 0.03, Spread(430, 1.1)),
    ),
    group_chance=0.015,
    group_size=Spread.of(7, 51),
)
"""107 turns up to 195,000 tokens, answers of 317; gaps of 2 s in the median, p90 24 s, p99 684 s;
groups of 7 sub-agents, p90 51."""
SHORT = AgentLoad(
    num_sessions=150,
    arrival_seconds=600.0,
    turns=Spread(33, 0.3),
    system=4000,
    first_prompt=12_000,
    longest=80_000,
    answer=Spread(350, 0.6),
    gaps=(
        Gap(TOOL, 0.80, Spread(4.25, 0.7)),
        Gap(TOOL, 0.17, Spread(15, 0.6)),
        Gap(PERSON, 0.03, Spread(63, 0.6)),
    ),
)
"""33 turns from 12,000 to 80,000 tokens, 131 of them read for one written; gaps of 5.2 s in the
median, p99 81 s."""
LOADS = {"long": LONG, "short": SHORT}


class AgentRecord(TraceRecord, frozen=True, kw_only=True):
    """A request of a session, in Mooncake's format with more fields."""

    session: str = ""
    tenant: str = ""
    kind: str = ""
    """Word for what is due to answer: a tool, a person or a group of sub-agents."""
    is_last: bool = False
    """Whether the session ends with it; no policy reads this."""


@dataclass(slots=True)
class _Prompt:
    """Blocks of a growing prompt."""

    numbers: Iterator[int]
    hash_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def grow(self, num_tokens: int) -> None:
        """Appends tokens. A block that is not full changes with the tokens after it."""
        first = self.num_tokens // BLOCK
        self.num_tokens += num_tokens
        num_blocks = -(-self.num_tokens // BLOCK)
        self.hash_ids[first:] = [next(self.numbers) for _ in range(num_blocks - first)]

    def fork(self) -> _Prompt:
        return _Prompt(self.numbers, list(self.hash_ids), self.num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Drops all tokens after the first `num_tokens`."""
        self.num_tokens = num_tokens
        del self.hash_ids[-(-num_tokens // BLOCK) :]


def draw_sessions(load: AgentLoad, seed: int) -> list[AgentRecord]:
    """Requests of all sessions in order of time."""
    numbers = count()
    system = _Prompt(numbers)
    system.grow(load.system // BLOCK * BLOCK)
    sub_system = _Prompt(numbers)
    sub_system.grow(load.sub_system // BLOCK * BLOCK)
    records = list[AgentRecord]()
    for number in range(load.num_sessions):
        # Each session has its own draws: more sessions change none before them.
        rng = np.random.default_rng((seed, number))
        drawn = _Session(load, rng, f"s{number}", load.tenants[number % len(load.tenants)])
        records += drawn.run(system.fork(), sub_system)
    records.sort(key=lambda record: record.timestamp)
    return records


class _Session:
    """One session, with the groups of sub-agents that it starts."""

    def __init__(self, load: AgentLoad, rng: np.random.Generator, name: str, tenant: str) -> None:
        self._load = load
        self._rng = rng
        self._name = name
        self._tenant = tenant
        self._num_groups = 0
        self._records: list[AgentRecord] = []

    def run(self, prompt: _Prompt, sub_system: _Prompt) -> list[AgentRecord]:
        load = self._load
        rng = self._rng
        now = rng.uniform(0, load.arrival_seconds)
        num_turns = max(1, round(load.turns.draw(rng)))
        prompt.grow(round(load.first_prompt * rng.uniform(0.75, 1.25)) - load.system)
        asked_at = prompt.num_tokens
        for turn in range(num_turns):
            answer = self._answer()
            is_group = rng.uniform() < load.group_chance
            gap = self._gap()
            kind = GROUP if is_group else gap.kind
            is_last = turn == num_turns - 1
            self._send(now, prompt, answer, self._name, kind, is_last=is_last)
            now += answer * SECONDS_PER_TOKEN
            if is_group:
                now = self._start_group(now, sub_system)
            else:
                now += gap.seconds.draw(rng)
            added = load.added * rng.uniform(0.5, 1.5)
            if kind == PERSON:
                # The template drops thinking of all turns since the last message of a person.
                num_since = prompt.num_tokens - asked_at
                if load.drops_thinking and num_since > 0:
                    prompt.cut(asked_at)
                    prompt.grow(max(1, round(num_since * (1 - load.drops_thinking))))
                prompt.grow(answer + round(added))
                asked_at = prompt.num_tokens
            else:
                prompt.grow(answer + max(1, round(added) - answer))
        return self._records

    def _start_group(self, now: float, sub_system: _Prompt) -> float:
        """Runs sub-agents; returns when the last of them has ended."""
        load = self._load
        rng = self._rng
        self._num_groups += 1
        shared = sub_system.fork()
        shared.grow(round(load.group_prefix * rng.uniform(0.5, 1.5)))
        end = now
        for number in range(max(1, round(load.group_size.draw(rng)))):
            name = f"{self._name}.{self._num_groups}.{number}"
            at = now + rng.uniform(0, 0.5)
            prompt = shared.fork()
            num_turns = max(1, round(load.sub_turns.draw(rng)))
            for turn in range(num_turns):
                prompt.grow(max(1, round(load.sub_added * rng.uniform(0.5, 1.5))))
                answer = self._answer()
                is_last = turn == num_turns - 1
                self._send(at, prompt, answer, name, TOOL, is_last=is_last)
                at += answer * SECONDS_PER_TOKEN
                if not is_last:
                    at += load.gaps[0].seconds.draw(rng)
            end = max(end, at)
        return end

    def _send(
        self, now: float, prompt: _Prompt, answer: int, name: str, kind: str, *, is_last: bool
    ) -> None:
        self._records.append(
            AgentRecord(
                timestamp=now * 1000,
                input_length=prompt.num_tokens,
                output_length=answer,
                hash_ids=list(prompt.hash_ids),
                session=name,
                tenant=self._tenant,
                kind=kind,
                is_last=is_last,
            )
        )

    def _gap(self) -> Gap:
        gaps = self._load.gaps
        weights = np.array([gap.weight for gap in gaps])
        return gaps[int(self._rng.choice(len(gaps), p=weights / weights.sum()))]

    def _answer(self) -> int:
        return max(1, round(self._load.answer.draw(self._rng)))


def write_trace(path: Path, records: Sequence[AgentRecord]) -> None:
    """One JSON object a line."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for record in records:
            file.write(encoder.encode(record) + b"\n")


def scaled(load: AgentLoad, factor: float) -> AgentLoad:
    """A load with `factor` times as many sessions, whose arrivals take `factor` times as long."""
    return replace(
        load,
        num_sessions=max(1, round(load.num_sessions * factor)),
        arrival_seconds=load.arrival_seconds * factor,
    )
