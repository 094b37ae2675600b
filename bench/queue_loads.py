"""Loads for queue policies: requests with times of arrival, from a trace or drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .arrivals import poisson
from .trace_file import TraceRecord, read_trace

TRACE_BLOCK = 512
"""Tokens that a hash id of a trace stands for."""
FIRST_ID = 3
NUM_IDS = 30_000
"""Token ids of prompts are drawn from these."""
MAX_ANSWER = 4096
ONE = "tenant"
NUM_TENANTS = 4
GREEDY_PART = 10
"""In the load `tenants`, requests of one tenant for each request of another."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a load."""

    key: int
    at: float
    """Seconds from the load's begin."""
    tenant: str
    prompt: Callable[[], list[int]]
    """Makes the token ids: those of all requests at once would be gigabytes."""
    num_prompt_tokens: int
    num_answer_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_answer_tokens


def traced(path: Path, num_requests: int) -> list[Arrival]:
    """The first requests of a trace in Mooncake's format, at its times, all of one tenant. Raises
    `TraceError`."""
    return [
        Arrival(
            key=key,
            at=record.timestamp / 1000,
            tenant=ONE,
            prompt=partial(_prompt_of, record),
            num_prompt_tokens=record.input_length,
            num_answer_tokens=min(max(1, record.output_length), MAX_ANSWER),
        )
        for key, record in enumerate(read_trace(path, num_requests))
    ]


def documents(num_requests: int, rng: np.random.Generator) -> list[Arrival]:
    """Chats of one tenant, and one request in thirty about a long document."""
    is_long = rng.random(num_requests) < 1 / 30
    prompts = np.where(is_long, rng.integers(16_384, 65_536, num_requests), _chats(rng, is_long))
    return _drawn(prompts, _lognormal(rng, 150, 0.8, num_requests), rng)


def answers(num_requests: int, rng: np.random.Generator) -> list[Arrival]:
    """Chats of one tenant, one in ten of which has a long answer."""
    is_long = rng.random(num_requests) < 0.1
    short = _lognormal(rng, 150, 0.8, num_requests)
    outputs = np.where(is_long, rng.integers(2_048, MAX_ANSWER, num_requests), short)
    return _drawn(_chats(rng, is_long), outputs, rng)


def tenants(num_requests: int, rng: np.random.Generator) -> list[Arrival]:
    """Chats of several tenants, one of which sends ten times as many as any other."""
    weights = np.array([GREEDY_PART] + [1] * (NUM_TENANTS - 1), float)
    names = rng.choice(NUM_TENANTS, num_requests, p=weights / weights.sum())
    prompts = _lognormal(rng, 300, 0.8, num_requests)
    drawn = _drawn(prompts, _lognormal(rng, 150, 0.8, num_requests), rng)
    return [replace(each, tenant=f"tenant {name}") for each, name in zip(drawn, names, strict=True)]


MIXES = {"documents": documents, "answers": answers, "tenants": tenants}


def within(load: Sequence[Arrival], max_model_len: int) -> list[Arrival]:
    """The load with prompts cut to what a model takes beside the longest answer."""
    most = max_model_len - MAX_ANSWER
    return [
        replace(each, prompt=partial(_cut, each.prompt, most), num_prompt_tokens=most)
        if each.num_prompt_tokens > most
        else each
        for each in load
    ]


def at_rate(load: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The load at so many requests a second on average, its bursts stretched or pressed with it;
    infinite: all at once."""
    span = max(each.at for each in load)
    factor = 0.0 if rate == np.inf else len(load) / rate / (span or 1.0)
    return [replace(each, at=each.at * factor) for each in load]


def _drawn(prompts: Ids, outputs: Ids, rng: np.random.Generator) -> list[Arrival]:
    times = poisson(len(prompts), 1.0, rng)
    columns = zip(times, prompts, outputs, strict=True)
    return [
        Arrival(
            key=key,
            at=float(at),
            tenant=ONE,
            prompt=partial(_ids, key, int(prompt_len)),
            num_prompt_tokens=int(prompt_len),
            num_answer_tokens=int(output_len),
        )
        for key, (at, prompt_len, output_len) in enumerate(columns)
    ]


def _chats(rng: np.random.Generator, like: npt.NDArray[np.bool_]) -> Ids:
    return _lognormal(rng, 300, 0.8, like.size)


def _lognormal(rng: np.random.Generator, median: float, sigma: float, size: int) -> Ids:
    lengths = np.exp(rng.normal(np.log(median), sigma, size))
    return np.clip(lengths, 8, MAX_ANSWER).astype(np.int64)


def _prompt_of(record: TraceRecord) -> list[int]:
    blocks = [_ids(hash_id, TRACE_BLOCK) for hash_id in record.hash_ids]
    return [token for block in blocks for token in block][: record.input_length]


def _cut(prompt: Callable[[], list[int]], most: int) -> list[int]:
    return prompt()[:most]


def _ids(seed: int, count: int) -> list[int]:
    """Token ids that differ from those of other seeds after one or two."""
    steps = np.arange(count, dtype=np.int64) * (2 * seed + 1) + seed * 7919
    ids: list[int] = (FIRST_ID + (steps ^ (steps >> 15)) % NUM_IDS).tolist()
    return ids
