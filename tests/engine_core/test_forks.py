"""Sequences that begin alike: what is copied of a partly filled block, when, and that nothing is
read too early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.checked_engine import Driver
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint
from tests.long_values import long_but

MANY = 1 << 30
CONFIG = EngineConfig(
    block_size=BLOCK_SIZE,
    num_blocks=60,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=12,
    max_num_batched_tokens=50,
)


def choices(
    prompt_len: int, count: int, *, first_key: int = 0, max_tokens: int = 12, **fields: Any
) -> list[NewRequest]:
    """The choices of one request."""
    sampling = SamplingParams(seed=4, max_tokens=max_tokens)
    one = NewRequest(
        key=0,
        prompt_ids=list(range(prompt_len)),
        output_ids=[],
        sampling=sampling,
        forks=True,
        **fields,
    )
    return [replace(one, key=first_key + i, choice_index=i) for i in range(count)]


def run(driver: Driver, *requests: NewRequest) -> list[int | None]:
    """The cached tokens of each."""
    for request in requests:
        driver.add(request)
    driver.run()
    driver.check_ends()
    return [driver.streams[request.key].cached_tokens for request in requests]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("prompt_len", [2, 9, 15, 18, 30, 31, 40, 98])
def test_choices_share_their_prompt_to_the_token(prompt_len: int, depth: int) -> None:
    driver = Driver(replace(CONFIG, async_depth=depth), late_polls=2)
    assert run(driver, *choices(prompt_len, 4)) == [0, *[prompt_len - 1] * 3]
    assert driver.engine.load().num_copied_blocks == 3


@pytest.mark.parametrize("prompt_len", [16, 32, 96])
def test_all_but_the_last_token_of_a_prompt_of_whole_blocks_is_shared(prompt_len: int) -> None:
    assert run(Driver(CONFIG, late_polls=2), *choices(prompt_len, 3)) == [
        0,
        prompt_len - 1,
        prompt_len - 1,
    ]


@pytest.mark.parametrize("prompt_len", [1, 17])
def test_where_one_token_is_left_nothing_is_copied(prompt_len: int) -> None:
    driver = Driver(CONFIG, late_polls=2)
    assert run(driver, *choices(prompt_len, 3)) == [0, prompt_len - 1, prompt_len - 1]
    assert driver.engine.load().num_copied_blocks == 0


def test_requests_that_do_not_fork_share_blocks_alone() -> None:
    driver = Driver(CONFIG, late_polls=2)
    plain = [replace(each, forks=False) for each in choices(40, 3)]
    assert run(driver, *plain) == [0, 32, 32]
    assert driver.engine.load().num_copied_blocks == 0


def test_a_longer_prompt_is_computed_in_chunks_before_its_forks_begin() -> None:
    config = replace(CONFIG, long_prefill_chunk=7)
    assert run(Driver(config, late_polls=0), *choices(90, 3)) == [0, 89, 89]


def test_a_beam_goes_on_behind_the_token_that_its_last_step_computed() -> None:
    """Each step of a search is a request of its own, whose prompt is a token longer."""
    driver = Driver(CONFIG, late_polls=2)
    prompt_ids = list(range(21))
    cached = []
    for key in range(20):
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        request = NewRequest(
            key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling, forks=True
        )
        cached += run(driver, request)
        prompt_ids = [*prompt_ids, driver.streams[key].tokens[0]]
    assert cached == [0, *range(21, 40)]


def test_namespaces_share_nothing() -> None:
    driver = Driver(CONFIG, late_polls=2)
    one = choices(40, 1)
    other = choices(40, 1, first_key=1, namespace=b"b" * 16)
    assert run(driver, *one, *other) == [0, 0]


def test_prompts_that_are_scored_are_computed() -> None:
    driver = Driver(CONFIG, late_polls=2)
    [first, *others] = choices(40, 3)
    scored = replace(first, sampling=replace(first.sampling, num_prompt_logprobs=1))
    assert run(driver, scored, *others) == [0, 39, 39]
    again = replace(scored, key=7)
    assert run(driver, again) == [0]


def test_forks_of_one_that_leaves_are_answered_all_the_same() -> None:
    for num_steps in range(6):
        driver = Driver(replace(CONFIG, max_num_batched_tokens=12), late_polls=1)
        requests = choices(40, 4)
        for request in requests:
            driver.add(request)
        for _ in range(num_steps):
            driver.step()
        driver.cancel(0)
        driver.run()
        driver.check_ends()


@pytest.mark.parametrize("num_blocks", [9, 10, 12, 14, 18])
def test_where_blocks_are_short_forks_wait_and_are_woken(num_blocks: int) -> None:
    """A block that a step in flight copies is held a little longer than its row: what waits for it
    hears of it."""
    for depth in (1, 2, 4):
        driver = Driver(replace(CONFIG, num_blocks=num_blocks, async_depth=depth), late_polls=3)
        requests = [*choices(40, 4, max_tokens=1), *choices(70, 3, first_key=4, max_tokens=30)]
        run(driver, *requests)
        assert driver.engine.load().num_used_blocks == 0


def test_a_block_that_was_taken_for_something_else_is_not_found() -> None:
    pool = BlockPool(5)
    [first, second] = pool.allocate(2)
    pool.note_partial(first, b"first")
    pool.note_partial(second, b"second")
    pool.release([first, second])
    assert (pool.find_partial(b"first"), pool.find_partial(b"second")) == (first, second)
    # Those that nothing can be found in go first.
    assert set(pool.allocate(2)).isdisjoint({first, second})
    pool.allocate(1)
    assert [pool.find_partial(key) is None for key in (b"first", b"second")].count(True) == 1


def test_a_block_has_one_key_which_is_its_last() -> None:
    pool = BlockPool(5)
    [first] = pool.allocate(1)
    pool.note_partial(first, b"key")
    pool.note_partial(first, b"other")
    assert (pool.find_partial(b"key"), pool.find_partial(b"other")) == (None, first)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("forks")
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours", "bfloat16")


@pytest.mark.parametrize("prompt_len", long_but((9, 50, 64), 50))
def test_a_model_on_a_cpu_answers_the_same_from_copies(folder: Path, prompt_len: int) -> None:
    check_copies(SmallEngine(folder), SmallEngine(folder), prompt_len)


def check_copies(alone: SmallEngine, together: SmallEngine, prompt_len: int) -> None:
    """Four choices of a request are told the same where they are copied as where each is
    computed."""
    prompt_ids = np.random.default_rng(prompt_len).integers(3, 512, prompt_len).tolist()
    sampling = SamplingParams(temperature=0.9, seed=2, max_tokens=20, num_logprobs=2)
    known = []
    reported = []
    for small, forks, answers in ((alone, False, known), (together, True, reported)):
        tokens: dict[int, list[int]] = {i: [] for i in range(4)}
        for i in range(4):
            new = NewRequest(
                key=i,
                prompt_ids=prompt_ids,
                output_ids=[],
                sampling=sampling,
                choice_index=i,
                forks=forks,
            )
            small.engine.add(new)
            while not forks and small.engine.has_work():
                receive(small, tokens)
        while small.engine.has_work():
            receive(small, tokens)
        answers.extend(tokens.values())
    assert reported == known
    assert together.engine.load().num_copied_blocks == 3


def receive(small: SmallEngine, tokens: dict[int, list[int]]) -> None:
    if (output := small.engine.step()) is not None:
        found = iter(output.token_ids)
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            tokens[key] += [next(found) for _ in range(count)]


def test_slots_of_used_blocks_hold_tokens_to_96_percent_under_mixed_load() -> None:
    """Prompts of 20 to 900 tokens, answers of up to 200, some in four choices, in blocks of 16."""
    config = EngineConfig(
        block_size=16,
        num_blocks=700,
        max_model_len=1200,
        max_num_seqs=32,
        max_num_batched_tokens=256,
    )
    rng = np.random.default_rng(11)
    engine = Engine(config, SimulatedExecutor(config, SimulatedModel(vocab_size=1000)))
    key = 0
    shares = []
    for _ in range(60):
        prompt_ids = rng.integers(
            0, 1000, int(np.exp(rng.uniform(np.log(20), np.log(900))))
        ).tolist()
        sampling = SamplingParams(seed=key, max_tokens=int(rng.integers(10, 200)))
        count = 4 if rng.random() < 0.3 else 1
        for choice_index in range(count):
            new = NewRequest(
                key=key,
                prompt_ids=prompt_ids,
                output_ids=[],
                sampling=sampling,
                choice_index=choice_index,
                forks=count > 1,
            )
            engine.add(new)
            key += 1
    while engine.has_work():
        engine.step()
        load = engine.load()
        if load.num_running >= 8:
            shares.append(1 - load.num_wasted_slots / (16 * load.num_used_blocks))
    assert len(shares) > 100
    assert np.mean(shares) >= 0.96
    assert engine.load().num_copied_blocks > 20
