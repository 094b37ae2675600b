"""Blocks that no layer sees any more: they go back to the pool while the sequence grows, and a
prefix is continued where those that are seen are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executors.build import engine_limits
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.prefix_cache import HashChain, HeldPages, Hits, PrefixCache
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.page_groups import kinds_of
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.blocks.blocks import Blocks
from headwater.engine_core.weights.page_plan import one_group
from tests.engine_core.checked_engine import Driver
from tests.engine_core.checked_executor import BLOCK_SIZE, MAX_MODEL_LEN
from tests.engine_core.small_models import (
    Answer,
    SmallEngine,
    check_greedy,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

WINDOW = 40
"""Window of the small checkpoints, in tokens."""
MANY = 1 << 30


def config(*windows: int, num_blocks: int = 40, **more: Any) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        page_windows=windows,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=30,
        **more,
    )


def request(key: int, prompt_ids: Sequence[int], max_tokens: int) -> NewRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=key)
    return NewRequest(key=key, prompt_ids=list(prompt_ids), output_ids=[], sampling=sampling)


@pytest.mark.parametrize(
    ("window", "depth", "most"),
    [(0, 2, 8), (2, 1, 2), (2, 4, 2), (16, 4, 3), (17, 1, 3), (40, 1, 4), (40, 4, 4), (60, 4, 5)],
)
def test_a_long_answer_holds_the_blocks_in_its_window(window: int, depth: int, most: int) -> None:
    driver = Driver(config(window, async_depth=depth), late_polls=0)
    driver.add(request(0, [1, 2, 3], 120))
    most_used = 0
    while driver.engine.has_work():
        driver.step()
        most_used = max(most_used, driver.engine.load().num_used_blocks)
    assert most_used <= most
    assert (most_used == 8) == (window == 0)
    driver.check_ends()


def test_a_long_answer_holds_all_pages_of_one_kind_and_the_window_of_another() -> None:
    driver = Driver(config(0, 0, 20, 20, 20, async_depth=1), late_polls=0)
    driver.add(request(0, [1, 2, 3], 120))
    most = {"0": 0, "20": 0}
    while driver.engine.has_work():
        driver.step()
        found = driver.engine.load().num_pages_by_window
        most = {window: max(count, found[window]) for window, count in most.items()}
    assert most == {"0": 2 * 8, "20": 3 * 3}
    assert driver.engine.load().num_pages_by_window == {"0": 0, "20": 0}
    driver.check_ends()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_is_computed_in_the_blocks_of_its_window_and_chunks(depth: int) -> None:
    """One token of the window may lie in a block before it, and one of the last chunk behind."""
    chunk = 8
    small = config(20, async_depth=depth, long_prefill_chunk=chunk)
    assert small.fewest_blocks == 1 + -(-(20 + (depth + 1) * chunk) // BLOCK_SIZE) + 1
    small = replace(small, num_blocks=small.fewest_blocks)
    driver = Driver(small, late_polls=0)
    for key in range(3):
        driver.add(request(key, range(100 * key, 100 * key + 100), 20))
    driver.run()
    driver.check_ends()


def test_fewer_blocks_than_the_window_and_chunks_take_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="num_blocks is 4; allowed: at least 5 for max_model_len 128 and a window of 20",
    ):
        config(20, num_blocks=4, async_depth=1, long_prefill_chunk=8)


HASHES = [bytes([number]) * 16 for number in range(8)]


@pytest.mark.parametrize(
    ("cached", "reach", "expected"),
    [
        ([0, 1, 2, 3], 0, (0, 4)),
        ([0, 1, 2, 3], 2, (2, 2)),
        ([0, 1, 4, 5, 6], 2, (5, 2)),
        ([0, 1, 4, 5, 6], 3, (4, 3)),
        ([0, 1, 4, 5, 6], 4, (0, 2)),
        ([1, 2, 3], 4, (0, 0)),
        ([0], 4, (0, 1)),
        ([], 1, (0, 0)),
        ([7], 1, (7, 1)),
    ],
)
def test_a_prefix_is_continued_where_all_that_is_seen_is_cached(
    cached: list[int], reach: int, expected: tuple[int, int]
) -> None:
    pool = BlockPool(20)
    block_of = {number: pool.allocate(1)[0] for number in cached}
    for number, block in block_of.items():
        pool.cache(block, HASHES[number])
    first, count = expected
    cache = PrefixCache(pool, kinds_of([reach + 1 if reach else 0]))
    hits = cache.match(HashChain(bytes(16), hashes=list(HASHES)), len(HASHES))
    blocks = [block_of[first + i] for i in range(count)]
    assert hits == Hits(first + count, (HeldPages(first, first + count, blocks),))


def test_a_prompt_that_comes_again_needs_the_blocks_in_its_window_alone() -> None:
    """The first ones have been handed out to another request."""
    driver = Driver(config(24, num_blocks=9), late_polls=0)
    driver.add(request(0, range(100), 1))
    driver.run()
    driver.add(request(1, range(200, 260), 1))
    driver.run()
    again = request(2, range(100), 4)
    hashes = block_hashes(again.namespace, np.arange(96, dtype=np.int32), BLOCK_SIZE)
    assert hashes[0] not in driver.cached
    assert driver.cached >= set(hashes[4:])
    driver.add(again)
    driver.run()
    assert driver.streams[2].cached_tokens == 96
    driver.check_ends()


def released_early(blocks: Blocks) -> None:
    blocks._kinds = tuple(kind._replace(window=max(0, kind.window - 1)) for kind in blocks._kinds)


def released_with_another_kind(blocks: Blocks) -> None:
    blocks._kinds = tuple(kind._replace(window=33) for kind in blocks._kinds)


def hit_too_short(blocks: Blocks) -> None:
    blocks._cache._num_seen[-1] -= 1


NUM_SEEDS = 8
"""Each of the bugs below shows at one of them."""


def serve_at_random(windows: tuple[int, ...], prepare: Callable[[Blocks], None]) -> None:
    """Requests take one another's pages as soon as these are free."""
    for seed in range(NUM_SEEDS):
        rng = np.random.default_rng(seed)
        # What is not cached is taken first.
        is_caching = bool(seed % 2)
        few = config(*windows, num_blocks=100, enable_prefix_caching=is_caching)
        few = replace(few, num_blocks=few.fewest_blocks + seed % 3)
        driver = Driver(few, late_polls=0)
        prepare(driver.engine._scheduler.blocks)
        for key in range(8):
            start = int(rng.integers(2)) * 100
            prompt = range(start, start + int(rng.integers(1, 90)))
            driver.add(request(key, prompt, int(rng.integers(1, 30))))
            for _ in range(int(rng.integers(9))):
                driver.step()
        driver.run()
        driver.check_ends()


@pytest.mark.parametrize("windows", long_but([(33,), (0, 33), (0, 0, 20, 33)], (0, 33)))
def test_random_requests_get_the_tokens_that_they_get_alone(windows: tuple[int, ...]) -> None:
    serve_at_random(windows, lambda blocks: None)


@pytest.mark.parametrize(
    ("windows", "bug"),
    [
        ((33,), released_early),
        ((33,), hit_too_short),
        ((0, 33), released_early),
        ((0, 33), hit_too_short),
        ((0, 33), released_with_another_kind),
        pytest.param((0, 0, 20, 33), released_early, marks=pytest.mark.long),
        pytest.param((0, 0, 20, 33), hit_too_short, marks=pytest.mark.long),
    ],
)
def test_blocks_that_are_released_or_hit_wrongly_change_a_token(
    windows: tuple[int, ...], bug: Callable[[Blocks], None]
) -> None:
    with pytest.raises(AssertionError):
        serve_at_random(windows, bug)


class Checkpoint(NamedTuple):
    """A random checkpoint: transformers' model, our folder, and the windows of its page groups."""

    model: Any
    folder: Path
    windows: tuple[int, ...]


FAMILIES = {
    "mistral with a window": (WINDOW,),
    "phi3": (WINDOW,),
    "gemma2": (0, WINDOW, WINDOW),
    "gemma3": (0, *(WINDOW,) * 5),
    "gemma3 whose last layer has a window": (0, WINDOW, WINDOW),
    "olmo3": (0, WINDOW, WINDOW),
}
"""Windows of the page groups of each."""
SHORT = "mistral with a window", "gemma3 whose last layer has a window"


@pytest.fixture(scope="module", params=long_but(FAMILIES, SHORT[-1]))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("windows")
    model = random_checkpoint(request.param, folder / "hf")
    return Checkpoint(model, convert(folder / "hf", folder / "ours"), FAMILIES[request.param])


def test_answers_are_those_of_transformers_around_the_window(checkpoint: Checkpoint) -> None:
    """In prompts as long as the window and beside it, in chunks and after hits, while sequences
    take one another's blocks."""
    model, folder, windows = checkpoint
    lengths = 2 * (1, WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 512, n).tolist() for n in lengths]
    num_tokens = WINDOW + 20
    options = {"max_model_len": 8 * WINDOW, "num_blocks": 16, "long_prefill_chunk": 7}
    engine = SmallEngine(folder, **options)
    assert engine.config.page_windows == windows
    answers = engine.tokens(prompts, greedy(num_tokens))
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(model, prompt, answer, num_tokens)
    for prompt, answer in zip(prompts[:5], answers, strict=False):
        assert engine.tokens([prompt], greedy(20)) == [answer[:20]]
        (again,) = engine.answer([prompt + answer[:20]], greedy(5))
        assert again.token_ids == answer[20:25]
        assert again.cached_tokens == (len(prompt) + 19) // 16 * 16
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "family",
    ["mistral with a window", "gemma3", "gemma3 whose last layer has a window", "olmo3"],
)
def test_blocks_that_are_released_on_a_gpu_change_no_bit(
    family: str, block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(family, tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    prompts = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 39, 41, 160, 300)]

    def answers(*windows: int) -> list[Answer]:
        engine = SmallEngine(
            folder, device="cuda", block_size=block_size, num_blocks=1600 // block_size
        )
        assert engine.config.page_windows == windows
        found = engine.answer(prompts, greedy(200, num_logprobs=1))
        engine.close()
        return found

    released = answers(*FAMILIES[family])
    monkeypatch.setattr(
        engine_limits, "pages_of", lambda options, model, length, **more: one_group(model)
    )
    assert released == answers(0)
