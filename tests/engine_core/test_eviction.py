"""Blocks that an engine evicts by value, against what requests say of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headwater.engine_core.config import BY_VALUE, LRU, ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.engine_limits import attention_pivot_of
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.models import registry
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.engine.settings import EngineSettings
from tests.engine_core.driven_engine import DrivenEngine

CONFIG = EngineConfig(num_blocks=41, max_model_len=640, max_num_seqs=4, async_depth=1)
BLOCK = CONFIG.block_size


class Chats:
    """An engine on a clock of its own, and prompts that are named by their first token."""

    def __init__(self, eviction: str = BY_VALUE) -> None:
        self.now = 0.0
        config = replace(CONFIG, eviction=eviction)
        executor = SimulatedExecutor(config, SimulatedModel(vocab_size=1000))
        self.driven = DrivenEngine(Engine(config, executor, clock=lambda: self.now))
        self._num_asked = 0

    def ask(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> int:
        """Answers a prompt; returns how many of its tokens were cached."""
        key = self.add(prompt, max_tokens, **fields)
        self.driven.run()
        return self.driven.cached[key]

    def add(self, prompt: list[int], max_tokens: int, **fields: Any) -> int:
        self._num_asked += 1
        key = self._num_asked
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.driven.tokens[key] = []
        self.driven.engine.add(
            NewRequest(key=key, prompt_ids=prompt, output_ids=[], sampling=sampling, **fields)
        )
        return key


def prompt(first: int, num_blocks: int) -> list[int]:
    return [first, *range(1, num_blocks * BLOCK)]


@pytest.mark.parametrize(("eviction", "num_cached"), [(BY_VALUE, 10 * BLOCK), (LRU, 0)])
def test_a_hint_keeps_a_prompt_that_lru_evicts(eviction: str, num_cached: int) -> None:
    chats = Chats(eviction)
    kept = [*prompt(1, 10), 5]
    chats.ask(kept, keep_seconds=60.0)
    for first in range(2, 6):
        chats.now += 1
        chats.ask(prompt(first, 10))
    assert chats.ask(kept) == num_cached


def test_what_a_hint_keeps_is_counted() -> None:
    chats = Chats()
    chats.ask([*prompt(1, 10), 5], keep_seconds=60.0)
    assert chats.driven.engine.load().num_kept_blocks == 10
    chats.now += 61
    assert chats.driven.engine.load().num_kept_blocks == 0


def test_a_flood_of_one_tenant_leaves_another_one_its_prompt() -> None:
    chats = Chats()
    calm = [*prompt(1, 10), 5]
    chats.ask(calm, tenant="calm")
    for first in range(2, 20):
        chats.now += 1
        chats.ask(prompt(first, 10), tenant="flood", keep_seconds=60.0)
    assert chats.ask(calm, tenant="calm") == 10 * BLOCK


@pytest.mark.parametrize("keeps_answer", [False, True])
def test_an_abandoned_answer_is_evicted_before_older_prompts(keeps_answer: bool) -> None:
    """An answer that ended by a stop string is kept though the engine ended it by a cancel."""
    chats = Chats()
    older = [*prompt(1, 10), 5]
    chats.ask(older)
    chats.now += 1
    asked = [*prompt(2, 10), 5]
    key = chats.add(asked, max_tokens=200)
    while len(chats.driven.tokens[key]) < 8 * BLOCK:
        chats.driven.step()
    chats.driven.engine.cancel(key, keeps_answer=keeps_answer)
    chats.driven.run()
    chats.now += 1
    chats.ask(prompt(3, 19))
    assert chats.ask(asked) == 10 * BLOCK
    assert (chats.ask(older) == 10 * BLOCK) is not keeps_answer


def test_prompts_of_cancelled_requests_are_of_a_class_of_their_own() -> None:
    """Conversations return after each turn, but none whose turn was cancelled."""
    chats = Chats()

    def cancel(first: int) -> None:
        key = chats.add([*prompt(first, 2), 5], max_tokens=200)
        while not chats.driven.tokens[key]:
            chats.driven.step()
        chats.driven.engine.cancel(key)
        chats.driven.run()

    for number in range(70):
        cancel(500 + number)
        for _ in range(2):
            chats.now += 5
            chats.ask([*prompt(100 + number, 2), 5])
    chats.ask([*prompt(1, 10), 5])
    chats.now += 1
    cancel(2)
    for first in range(3, 6):
        chats.now += 0.1
        chats.ask([*prompt(first, 9), 5])
    assert chats.ask([*prompt(1, 10), 5]) == 10 * BLOCK
    assert chats.ask([*prompt(2, 2), 5]) == 0


def test_eviction_by_value_is_opt_in() -> None:
    assert CONFIG.eviction == EngineSettings(executor="simulated").eviction == LRU


def test_an_order_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="eviction is 'fifo'; allowed: lru or value or value-wait"
    ):
        replace(CONFIG, eviction="fifo")


def test_attention_takes_as_long_as_the_weights_of_an_8b_model_behind_some_20000_tokens() -> None:
    model = registry.config_of(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
        }
    )
    assert attention_pivot_of(model) == 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) // (2 * 4096)
