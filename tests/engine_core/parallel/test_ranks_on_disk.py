"""Engines of several ranks whose blocks lie on a disk: a block there is as one process has it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executor import Int32Array, Swapper, SwapPlan
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.executors.tiers.block_slice import BlockSlice
from headwater.engine_core.executors.tiers.memory_swapper import MemorySwapper
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel.rank_facts import RankLost
from tests.engine_core.made_blocks import blocks_of
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.small_models import Answer, SmallEngine, greedy
from tests.long_values import long_but

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(3, 512, 100).tolist() for _ in range(4)]
NUM_CACHED = 96
FEW_BLOCKS = {"num_blocks": 18, "max_model_len": 160}
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
NONE = np.empty(0, np.int32)
BLOCK = np.array([1], np.int32)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))
    return folder


def sized(layout: tuple[int, int]) -> dict[str, Any]:
    return {"tensor_parallel_size": layout[0], "pipeline_parallel_size": layout[1], **FEW_BLOCKS}


def asked(engine: SmallEngine, number: int) -> Answer:
    [answer] = engine.answer([PROMPTS[number]], greedy(8, num_logprobs=2))
    engine.settle()
    return answer


def same(one: Answer, other: Answer) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.parametrize("layout", long_but(LAYOUTS, (2, 1)), ids=str)
def test_blocks_of_ranks_come_back_from_the_disk_and_outlive_the_engine(
    layout: tuple[int, int], qwen3: Path, tmp_path: Path
) -> None:
    expected = list[Answer]()
    for life in range(2):
        with engine_of(qwen3, kv_disk_dir=tmp_path, **sized(layout)) as engine:
            engine.settle()
            for number in range(len(PROMPTS)):
                answer = asked(engine, number)
                if not life:
                    expected.append(answer)
                assert same(answer, expected[number])
                assert answer.cached_tokens == (NUM_CACHED if life else 0)
            assert same(asked(engine, 0), expected[0])
            assert engine.engine.load().hits_by_tier == {"disk": (4 * life + 1) * NUM_CACHED}


@pytest.mark.long
def test_engines_of_any_size_share_blocks_under_tree_numerics(qwen3: Path, tmp_path: Path) -> None:
    """Each engine computes a prompt, and finds those that engines of other sizes have computed."""
    layouts = [(1, 1), *LAYOUTS]
    with engine_of(qwen3, numerics="tree", **sized((1, 1))) as engine:
        expected = [asked(engine, number) for number in range(len(PROMPTS))]
    for number, layout in enumerate(layouts):
        with engine_of(qwen3, numerics="tree", kv_disk_dir=tmp_path, **sized(layout)) as engine:
            engine.settle()
            for known in range(number + 1):
                answer = asked(engine, known)
                assert same(answer, expected[known])
                assert answer.cached_tokens == (NUM_CACHED if known < number else 0)


@pytest.mark.long
def test_preempted_requests_go_on_from_the_disk_with_the_same_tokens(
    qwen3: Path, tmp_path: Path
) -> None:
    prompts = [RNG.integers(3, 512, 60).tolist() for _ in range(6)]
    layout = {"tensor_parallel_size": 2, "max_model_len": 256}
    with engine_of(qwen3, **layout) as engine:
        known = [engine.tokens([prompt], greedy(60))[0] for prompt in prompts]
    with engine_of(qwen3, kv_disk_dir=tmp_path, num_blocks=26, **layout) as engine:
        assert engine.tokens(prompts, greedy(60)) == known
        assert engine.engine.load().num_preemptions > 0
        engine.settle()
        assert engine.engine.load().num_used_blocks == 0


def test_a_rank_that_is_lost_ends_copies_too(qwen3: Path, tmp_path: Path) -> None:
    with engine_of(qwen3, kv_disk_dir=tmp_path, **sized((2, 1))) as engine:
        asked(engine, 0)
        assert isinstance(engine.executor, MultiExecutor)
        assert engine.executor.swapper is not None
        save = SwapPlan(out_blocks=BLOCK, out_slots=BLOCK, in_slots=NONE, in_blocks=NONE)
        os.kill(engine.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            swap_for_ever(engine.executor.swapper, save)


def swap_for_ever(swapper: Swapper, plan: SwapPlan) -> None:
    while True:
        swapper.swap(plan)


def words(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def test_the_parts_of_ranks_make_the_block_of_one_process() -> None:
    whole = torch.randn(4, 2, 9, 6, 16, 8)
    alone = MemorySwapper.of(blocks_of(whole).memory, 3)
    slots = np.zeros_like(alone.slots)
    save = SwapPlan(out_blocks=words(3, 5), out_slots=words(2, 0), in_slots=NONE, in_blocks=NONE)
    alone.swap(save)
    parts = [
        (layers, heads)
        for layers in (range(1), range(1, 4))
        for heads in (range(2), range(2, 4), range(4, 6))
    ]
    owned = [
        blocks_of(whole[layers.start : layers.stop, :, :, heads.start : heads.stop])
        for layers, heads in parts
    ]
    swappers = []
    for (layers, heads), blocks in zip(parts, owned, strict=True):
        planes = range(2 * layers.start, 2 * layers.stop)
        part = BlockSlice(num_planes=8, planes=planes, num_heads=6, heads=heads)
        swappers.append(MemorySwapper.of_part(blocks, slots, part, saves_drafts=True))
    for swapper in swappers:
        swapper.swap(save)
    assert (slots == alone.slots).all()
    for blocks, swapper in zip(owned, swappers, strict=True):
        (cache,) = blocks.kv_caches
        before = cache.clone()
        cache.zero_()
        swapper.swap(
            SwapPlan(out_blocks=NONE, out_slots=NONE, in_slots=words(0, 2), in_blocks=words(8, 1))
        )
        assert torch.equal(cache[:, :, 8], before[:, :, 5])
        assert torch.equal(cache[:, :, 1], before[:, :, 3])
        assert not cache[:, :, [0, 2, 3, 4, 5, 6, 7]].any()


REFUSALS = {
    "kv_swap_memory": (
        1 << 20,
        "kv_swap_memory is 1048576; allowed: 0 with tensor_parallel_size 2",
    ),
    "kv_peer_memory": (
        1 << 20,
        "kv_peer_memory is 1048576; allowed: 0 with tensor_parallel_size 2",
    ),
    "kv_disk_dir": (Path("/kv"), "kv_disk_dir is '/kv'; allowed: none with tensor_parallel_size 2"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_platform_whose_ranks_share_no_slots_keeps_blocks_in_its_cache(
    name: str, qwen3: Path
) -> None:
    value, sentence = REFUSALS[name]
    flags = replace(cpu.capabilities, host_blocks=True, rank_slots=False)
    options: Any = {name: value}
    with pytest.raises(ConfigError) as error:
        checked(
            ExecutorOptions(model_folder=qwen3, tensor_parallel_size=2, **options), "small", flags
        )
    assert str(error.value) == sentence
    checked(ExecutorOptions(model_folder=qwen3, **options), "small", flags)
