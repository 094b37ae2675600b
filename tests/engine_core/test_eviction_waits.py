"""Prompts that wait rather than evict conversations that are expected back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.bench.agent_engines import simulated
from headwater.bench.agent_load import Run
from headwater.bench.agents import SERVED_LOAD, compare
from headwater.engine_core.config import BY_VALUE, LRU, VALUE_WAIT, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.seating import eviction_waits
from headwater.engine_core.scheduling.seating.eviction_waits import MOST_SECONDS
from tests.engine_core.driven_engine import DrivenEngine

CONFIG = EngineConfig(num_blocks=41, max_model_len=640, max_num_seqs=4, async_depth=1)
BLOCK = CONFIG.block_size
GAP = 2.0
"""Seconds after which each conversation returns once."""
RUNNING = 1000
LONG = 10
SHORT = 1
"""Blocks of prompts whose loss is worth waiting for, and is not."""


class Conversations:
    """An engine whose cache is full of conversations that return soon, beside a running request."""

    def __init__(self, eviction: str, num_host_blocks: int = 0) -> None:
        self.now = 0.0
        config = replace(CONFIG, eviction=eviction, num_host_blocks=num_host_blocks)
        executor = SimulatedExecutor(
            config,
            SimulatedModel(vocab_size=1000),
            SimulatedTiming(seconds_per_prefill_token=1.5e-3),
            clock=lambda: self.now,
            sleep=self._sleep,
        )
        self.driven = DrivenEngine(Engine(config, executor, clock=lambda: self.now))
        for number in range(70):
            for _ in range(2):
                self.add(number, 2)
                self.driven.run()
                self.now += GAP
        for number in range(100, 108):
            self.add(number, LONG)
            self.driven.run()
        self.now += 0.9 * GAP
        self.add(RUNNING, 1, max_tokens=60)
        while not self.driven.tokens[RUNNING]:
            self.driven.step()

    def _sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def add(self, first: int, num_blocks: int, max_tokens: int = 1, tenant: str = "") -> None:
        prompt = [first, *range(1, num_blocks * BLOCK), 5]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.driven.tokens[first] = []
        self.driven.engine.add(
            NewRequest(
                key=first, prompt_ids=prompt, output_ids=[], sampling=sampling, tenant=tenant
            )
        )

    def begins_at_once(self, first: int, num_blocks: int = LONG, tenant: str = "") -> bool:
        """Whether a new prompt is computed while the other request runs."""
        self.add(first, num_blocks, tenant=tenant)
        for _ in range(4):
            self.driven.step()
        assert self.is_running
        return bool(self.driven.tokens[first])

    @property
    def is_running(self) -> bool:
        return len(self.driven.tokens[RUNNING]) < 60


@pytest.mark.parametrize(
    ("eviction", "num_blocks", "begins"),
    [
        (VALUE_WAIT, LONG, False),
        (VALUE_WAIT, SHORT, True),
        (BY_VALUE, LONG, True),
        (LRU, LONG, True),
    ],
)
def test_a_long_prompt_waits_rather_than_evict_what_is_expected_back(
    eviction: str, num_blocks: int, begins: bool
) -> None:
    conversations = Conversations(eviction)
    assert conversations.begins_at_once(2000, num_blocks) is begins
    conversations.driven.run()
    assert conversations.driven.tokens[2000]


def test_a_prompt_that_waits_begins_when_a_request_ends() -> None:
    conversations = Conversations(VALUE_WAIT)
    assert not conversations.begins_at_once(2000)
    while conversations.is_running:
        conversations.driven.step()
        assert not conversations.driven.tokens[2000]
    for _ in range(4):
        conversations.driven.step()
    assert conversations.driven.tokens[2000]


def test_others_pass_a_prompt_that_waits() -> None:
    conversations = Conversations(VALUE_WAIT)
    assert not conversations.begins_at_once(2000)
    conversations.add(2001, SHORT)
    while not conversations.driven.tokens[2001]:
        conversations.driven.step()
        assert conversations.is_running
    assert not conversations.driven.tokens[2000]


def test_no_prompt_waits_longer_than_its_time() -> None:
    conversations = Conversations(VALUE_WAIT)
    assert not conversations.begins_at_once(2000)
    conversations.now += MOST_SECONDS
    for _ in range(4):
        conversations.driven.step()
    assert conversations.is_running
    assert conversations.driven.tokens[2000]


def test_a_tenant_that_has_less_than_its_share_of_the_cache_does_not_wait() -> None:
    assert Conversations(VALUE_WAIT).begins_at_once(2000, tenant="other")


def test_no_prompt_waits_where_host_memory_keeps_what_is_evicted() -> None:
    assert Conversations(VALUE_WAIT, num_host_blocks=100).begins_at_once(2000)


def test_no_prompt_waits_where_prompts_take_a_smaller_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction_waits, "BUSY", 0.5)
    assert Conversations(VALUE_WAIT).begins_at_once(2000)


def test_no_prompt_waits_where_nothing_runs() -> None:
    conversations = Conversations(VALUE_WAIT)
    conversations.driven.engine.cancel(RUNNING)
    conversations.driven.run()
    conversations.add(2000, LONG)
    for _ in range(4):
        conversations.driven.step()
    assert conversations.driven.tokens[2000]


@pytest.mark.long
def test_agents_that_need_more_memory_than_there_is_are_served_in_time_more_often() -> None:
    load = replace(SERVED_LOAD, longest=12_000)
    run = Run(load=load, num_sessions=64, seconds=90.0, start_seconds=22.5)
    lru, waiting = compare(run, simulated(run, 280_000), (LRU, VALUE_WAIT), (0,))
    assert waiting.goodput > 1.3 * lru.goodput
    assert waiting.ttft_p99 < MOST_SECONDS + 2 * lru.ttft_p99
