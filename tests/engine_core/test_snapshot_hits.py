"""Hits of agents whose prompts grow turn by turn, in a cache that holds a part of them: those at
snapshots beside those that a snapshot at every border would give."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.executors.simulated.states import num_units
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import StepOutput

VOCAB_SIZE = 40_000


class Load(NamedTuple):
    """Agents that share a system prompt; lengths in tokens."""

    num_agents: int
    num_at_once: int
    system: int
    task: range
    answer: range
    result: range
    """What a tool returns after each answer."""
    turns: range
    block_size: int
    state_pages: int
    num_blocks: int
    max_model_len: int


class Agents:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._rng = np.random.default_rng(0)
        system = self._ids(range(load.system, load.system + 1))
        self._prompts = [system + self._ids(load.task) for _ in range(load.num_agents)]
        self._turns = [self._number(load.turns) for _ in range(load.num_agents)]
        self._waiting = list(range(load.num_agents))
        self._running: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {}
        self._cached = set[bytes]()
        self.num_hits = 0
        self.num_cached = 0
        """Tokens of leading blocks that were cached when a prompt came, with a snapshot or not."""

    def run(self) -> None:
        load = self._load
        config = EngineConfig(
            block_size=load.block_size,
            num_blocks=load.num_blocks,
            state_pages=load.state_pages,
            max_model_len=load.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=4096,
            long_prefill_chunk=2048,
        )
        units = num_units(load.state_pages)
        model = SimulatedModel(vocab_size=VOCAB_SIZE, num_state_units=units)
        engine = Engine(config, SimulatedExecutor(config, model, verify_every=1 << 30))
        while self._waiting or self._running:
            while self._waiting and len(self._running) < load.num_at_once:
                engine.add(self._next())
            if (output := engine.step()) is not None:
                self._take(output)

    def _next(self) -> NewRequest:
        agent = self._waiting.pop(0)
        prompt = self._prompts[agent]
        self._note_cached(prompt)
        key = len(self._answers)
        self._running[key] = agent
        self._answers[key] = []
        sampling = SamplingParams(max_tokens=self._number(self._load.answer), seed=key)
        return NewRequest(key=key, prompt_ids=prompt, output_ids=[], sampling=sampling)

    def _note_cached(self, prompt: list[int]) -> None:
        size = self._load.block_size
        hashes = block_hashes(bytes(16), np.array(prompt[:-1], np.int32), size)
        lost = (idx for idx, each in enumerate(hashes) if each not in self._cached)
        self.num_cached += size * next(lost, len(hashes))

    def _take(self, output: StepOutput) -> None:
        if (events := output.cache_events) is not None:
            self._cached -= set(events.removed)
            self._cached |= {each for chain in events.stored for each in chain.hashes}
        self.num_hits += sum(started.cached_tokens for started in output.starts)
        tokens = iter(output.token_ids)
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            self._answers[key] += [next(tokens) for _ in range(count)]
        for finish in output.finishes:
            agent = self._running.pop(finish.key)
            self._prompts[agent] = [
                *self._prompts[agent],
                *self._answers[finish.key],
                *self._ids(self._load.result),
            ]
            self._turns[agent] -= 1
            if self._turns[agent]:
                self._waiting.append(agent)

    def _ids(self, length: range) -> list[int]:
        ids: list[int] = self._rng.integers(0, VOCAB_SIZE, self._number(length)).tolist()
        return ids

    def _number(self, numbers: range) -> int:
        return int(self._rng.integers(numbers.start, numbers.stop))


SMALL = Load(
    num_agents=6,
    num_at_once=3,
    system=100,
    task=range(100, 300),
    answer=range(5, 30),
    result=range(20, 200),
    turns=range(4, 9),
    block_size=16,
    state_pages=8,
    num_blocks=400,
    max_model_len=2500,
)
LARGE = Load(
    num_agents=12,
    num_at_once=8,
    system=3000,
    task=range(9000, 12_000),
    answer=range(50, 400),
    result=range(300, 3000),
    turns=range(10, 25),
    block_size=64,
    state_pages=76,
    num_blocks=8000,
    max_model_len=100_000,
)


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(LARGE, id="12,000 to 60,000 tokens of a 35B-A3B", marks=pytest.mark.long),
    ],
)
def test_agents_find_at_snapshots_nearly_all_that_is_cached(load: Load) -> None:
    agents = Agents(load)
    agents.run()
    assert agents.num_hits >= 0.99 * agents.num_cached
