"""Engines on a GPU that sleep: memory goes and comes back, tokens and graphs stay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from headwater.engine_core.request import NewRequest
from headwater.engine_core.waits_for import WaitsFor
from tests.engine_core.small_models import SmallEngine, greedy

pytestmark = pytest.mark.gpu

PROMPTS = [[5 + (7 * i + 31 * key) % 400 for i in range(300)] for key in range(4)]


def answers(engine: SmallEngine, max_tokens: int, num_sleeps: int, seed: int) -> list[list[int]]:
    """Answers to all prompts, over so many sleeps in between."""
    source = random.Random(seed)
    tokens: dict[int, list[int]] = {}
    first = 1000 * (seed + 1)
    for i, prompt in enumerate(PROMPTS):
        tokens[first + i] = []
        engine.engine.add(
            NewRequest(key=first + i, prompt_ids=prompt, output_ids=[], sampling=greedy(max_tokens))
        )

    def step() -> None:
        if (output := engine.engine.step()) is None:
            return
        at = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            tokens[key] += output.token_ids[at : at + count]
            at += count

    for _ in range(num_sleeps):
        for _ in range(source.randint(0, 12)):
            step()
        engine.engine.sleep()
        while not engine.engine.is_asleep:
            step()
        engine.engine.wake()
    while engine.engine.waits_for is not WaitsFor.WORK:
        step()
    return [tokens[first + i] for i in range(len(PROMPTS))]


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_tokens_are_the_same_over_sleeps_and_memory_goes(
    engine_of: Callable[..., SmallEngine],
) -> None:
    engine = engine_of(takes_turns=True, kv_swap_memory=256 << 20, max_draft_tokens=0)
    while engine.executor.prepare():
        pass
    plain = engine_of(kv_swap_memory=256 << 20, max_draft_tokens=0)
    expected = answers(plain, 60, 0, 0)
    assert answers(engine, 60, 0, 1) == expected
    assert answers(engine, 60, 20, 2) == expected
    load = engine.engine.load()
    assert load.num_sleeps == 20
    before = free_bytes()
    engine.engine.sleep()
    while not engine.engine.is_asleep:
        engine.engine.step()
    released = engine.engine.load().num_released_bytes
    assert free_bytes() - before >= released > 0
    engine.engine.wake()
    # Host memory has the prefixes.
    before_load = engine.engine.load().num_swapped_in
    assert answers(engine, 60, 0, 3) == expected
    assert engine.engine.load().num_swapped_in > before_load


def test_no_memory_is_lost_over_a_hundred_sleeps(engine_of: Callable[..., SmallEngine]) -> None:
    engine = engine_of(takes_turns=True, kv_swap_memory=64 << 20, max_draft_tokens=0)
    while engine.executor.prepare():
        pass
    answers(engine, 4, 2, 0)
    lost = []
    for seed in range(1, 6):
        before = free_bytes()
        answers(engine, 4, 20, seed)
        lost.append(before - free_bytes())
    # Another process may take memory of the device meanwhile, but what a sleep loses is lost in
    # each round. Torch's allocator may keep another segment for activations.
    assert min(lost) <= 6 << 20
