"""Tiers behind the device's cache with a model on a CPU: the same bits, whatever was written, kept
over a restart or damaged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.tiers.memory_swapper import MemorySwapper
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.made_blocks import blocks_of
from tests.engine_core.small_models import Answer, SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 512, 120).tolist() for _ in range(4)]
NUM_CACHED = 112
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=10, num_logprobs=2)
NUM_MIXED = 24
FEW_BLOCKS = {"num_blocks": 18, "max_model_len": 256}


@pytest.fixture(scope="module", params=long_but(("float32", "bfloat16"), "float32"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp(request.param)
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours", request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    engine = SmallEngine(folder, max_model_len=256)
    return [engine.answer([prompt], SAMPLING)[0] for prompt in PROMPTS]


def asked(engine: SmallEngine, number: int) -> Answer:
    [answer] = engine.answer([PROMPTS[number]], SAMPLING)
    engine.settle()
    return answer


def same(answer: Answer, other: Answer) -> bool:
    return (answer.token_ids, answer.logprobs) == (other.token_ids, other.logprobs)


def test_answers_are_the_same_bits_from_the_disk_also_after_a_restart(
    folder: Path, expected: list[Answer], tmp_path: Path
) -> None:
    for life in range(2):
        engine = SmallEngine(folder, kv_disk_dir=tmp_path / "kv", **FEW_BLOCKS)
        engine.settle()
        for number, known in enumerate(expected):
            answer = asked(engine, number)
            assert same(answer, known)
            assert answer.cached_tokens == (NUM_CACHED if life else 0)
        again = asked(engine, 0)
        assert same(again, expected[0])
        assert again.cached_tokens == NUM_CACHED
        assert engine.engine.load().hits_by_tier == {"disk": (4 * life + 1) * NUM_CACHED}
        engine.close()


def test_damaged_files_are_computed_and_never_served(
    folder: Path, expected: list[Answer], tmp_path: Path
) -> None:
    engine = SmallEngine(folder, kv_disk_dir=tmp_path, **FEW_BLOCKS)
    for number in range(4):
        asked(engine, number)
    for i, path in enumerate(
        sorted(path for path in tmp_path.glob("*/*/*/*") if path.name != "tenants")
    ):
        if i % 3 == 0:
            os.truncate(path, path.stat().st_size // 2)
        elif i % 3 == 1:
            data = bytearray(path.read_bytes())
            data[-7] ^= 16
            path.write_bytes(data)
    for number in (0, 1, 2, 3, 0, 1):
        assert same(asked(engine, number), expected[number])
    disk = engine.engine.load().disk
    assert disk is not None
    assert (disk.num_damaged > 0, disk.failure) == (True, "")
    engine.close()


def test_preempted_requests_go_on_from_the_disk_with_the_same_tokens(
    folder: Path, tmp_path: Path
) -> None:
    """The cache holds a part of what six requests need at once."""
    prompts = [RNG.integers(3, 512, 60).tolist() for _ in range(6)]
    alone = SmallEngine(folder, max_model_len=256)
    sampling = greedy(60)
    known = [alone.tokens([prompt], sampling)[0] for prompt in prompts]
    engine = SmallEngine(folder, kv_disk_dir=tmp_path, num_blocks=26, max_model_len=256)
    assert engine.tokens(prompts, sampling) == known
    load = engine.engine.load()
    assert load.num_preemptions > 0
    assert load.num_resumed_kept + load.num_resumed_loaded + load.num_resumed_computed > 0
    engine.settle()
    assert engine.engine.load().num_used_blocks == 0
    engine.close()


def test_blocks_of_another_model_are_not_found(folder: Path, tmp_path: Path) -> None:
    engine = SmallEngine(folder, kv_disk_dir=tmp_path, **FEW_BLOCKS)
    asked(engine, 0)
    engine.close()
    other = SmallEngine(folder, kv_disk_dir=tmp_path, block_size=32, **FEW_BLOCKS)
    other.settle()
    assert (asked(other, 0).cached_tokens, len(list(tmp_path.iterdir()))) == (0, 2)
    other.close()


def test_less_than_a_block_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_disk_memory is 100; allowed: .* bytes .a block. and more"
    ):
        SmallEngine(folder, kv_disk_dir=tmp_path, kv_disk_memory=100)


def test_the_swapper_of_a_cpu_copies_every_layer_of_every_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [
        torch.randn((layers, 2, 9, heads, 16, 8), generator=generator).to(dtype)
        for layers, heads, dtype in ((3, 2, torch.bfloat16), (1, 1, torch.float32))
    ]
    before = [cache.clone() for cache in caches]
    blocks = blocks_of(*caches)
    caches = blocks.kv_caches
    swapper = MemorySwapper.of(blocks.memory, 4)
    none = np.empty(0, np.int32)
    words = lambda *values: np.array(values, np.int32)  # noqa: E731
    swapper.swap(
        SwapPlan(out_blocks=words(3, 5), out_slots=words(2, 0), in_slots=none, in_blocks=none)
    )
    for cache in caches:
        cache.zero_()
    swapper.swap(
        SwapPlan(out_blocks=none, out_slots=none, in_slots=words(0, 2), in_blocks=words(8, 1))
    )
    assert (swapper.num_saved, swapper.num_loaded) == (2, 2)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, :, 1], old[:, :, 3])
        assert torch.equal(cache[:, :, 8], old[:, :, 5])
        assert not cache[:, :, [0, 2, 3, 4, 5, 6, 7]].any()


@dataclass(frozen=True, slots=True)
class Mixed:
    """Requests of many lengths that have parts of their prompts in common, and what each is told
    alone."""

    prompts: list[list[int]]
    samplings: list[SamplingParams]
    known: list[list[int]]

    def num_blocks(self) -> int:
        pairs = zip(self.prompts, self.samplings, strict=True)
        return sum(-(-(len(prompt) + sampling.max_tokens) // 16) for prompt, sampling in pairs)


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Mixed:
    rng = np.random.default_rng(8)
    lead = rng.integers(3, 512, 40).tolist()
    prompts = [
        [*lead[: rng.integers(0, 41)], *rng.integers(3, 512, rng.integers(1, 90)).tolist()]
        for _ in range(NUM_MIXED)
    ]
    samplings = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=16 + i % 50,
            presence_penalty=0.3 * (i % 3 == 0),
        )
        for i in range(NUM_MIXED)
    ]
    alone = SmallEngine(folder, max_model_len=224)
    known = [
        alone.tokens([prompt], sampling)[0]
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    alone.close()
    return Mixed(prompts, samplings, known)


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.long
def test_many_mixed_requests_in_a_tenth_of_the_memory_are_what_they_are_alone(
    folder: Path, mixed: Mixed, tmp_path: Path, has_disk: bool
) -> None:
    where = {"kv_disk_dir": tmp_path} if has_disk else {}
    engine = SmallEngine(
        folder, max_model_len=224, num_blocks=1 + mixed.num_blocks() // 10, **where
    )
    assert engine.tokens(mixed.prompts, *mixed.samplings) == mixed.known
    engine.settle()
    load = engine.engine.load()
    assert (load.num_preemptions > 0, load.num_used_blocks) == (True, 0)
    assert (load.disk is not None and load.disk.num_written > 0) == has_disk
    engine.close()
