"""Requests to be routed: arrival, lengths, and the blocks that their prompts begin with.

A published trace is read from a file; the shared-prefix ladder is generated. Knows nothing about
replicas.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from headwater.bench.agent_sessions import AgentLoad, draw_sessions
from headwater.bench.cache_replay import full_blocks, turn_of
from headwater.bench.trace_file import read_trace
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn

BLOCK_SIZE = 512
"""Number of tokens in a block of the conversation trace, the finest detail that it has of a prompt;
the ladder is cut the same way."""
LADDER = (
    *((15, 50), (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21)),
    *((40, 38), (43, 36), (46, 33), (49, 30), (52, 29), (55, 27), (57, 26), (60, 25)),
)
"""(requests a second, seconds) of each rate: the published benchmark of llm-d at 73 % of the
caches."""
_NUM_GROUPS = 150
_PROMPTS_PER_GROUP = 5
_SHARED_TOKENS = 6000
_OWN_TOKENS = 1200
_ANSWER_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int
    at: float
    """Seconds from the start."""
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: list[bytes]
    """Hashes of the prompt's full blocks."""
    turn: Turn = UNKNOWN


def agents(load: AgentLoad, seed: int) -> list[Arrival]:
    """Turns of drawn sessions of agents."""
    return [
        Arrival(
            number,
            record.timestamp / 1000,
            record.input_length,
            record.output_length,
            [_hash("agents", block) for block in full_blocks(record)],
            turn_of(record),
        )
        for number, record in enumerate(draw_sessions(load, seed))
    ]


def conversation(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of a trace in Mooncake's format, at least one. Raises
    `TraceError`."""
    arrivals = []
    for number, record in enumerate(read_trace(path, limit)):
        num_full = record.input_length // BLOCK_SIZE
        hashes = [_hash("conversation", block) for block in record.hash_ids[:num_full]]
        arrivals.append(
            Arrival(
                number, record.timestamp / 1000, record.input_length, record.output_length, hashes
            )
        )
    return arrivals


def ladder(seed: int, stages: tuple[tuple[int, int], ...] = LADDER) -> list[Arrival]:
    """Groups of prompts that share 6,000 of 7,200 tokens, in shuffled passes, at rates that
    climb."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    prompts = _shuffled_passes(rng)
    start = 0.0
    for rate, seconds in stages:
        at = start + rng.expovariate(rate)
        while at < start + seconds:
            arrivals.append(_ladder_prompt(len(arrivals), at, *next(prompts)))
            at += rng.expovariate(rate)
        start += seconds
    return arrivals


def _shuffled_passes(rng: random.Random) -> Iterator[tuple[int, int]]:
    prompts = [
        (group, prompt) for group in range(_NUM_GROUPS) for prompt in range(_PROMPTS_PER_GROUP)
    ]
    while True:
        rng.shuffle(prompts)
        yield from prompts


def _ladder_prompt(number: int, at: float, group: int, prompt: int) -> Arrival:
    num_tokens = _SHARED_TOKENS + _OWN_TOKENS
    num_shared = _SHARED_TOKENS // BLOCK_SIZE
    shared = [_hash("shared", group, block) for block in range(num_shared)]
    own = [
        _hash("own", group, prompt, block) for block in range(num_tokens // BLOCK_SIZE - num_shared)
    ]
    return Arrival(number, at, num_tokens, _ANSWER_TOKENS, shared + own)


def _hash(*words: object) -> bytes:
    return blake2b(repr(words).encode(), digest_size=16).digest()
