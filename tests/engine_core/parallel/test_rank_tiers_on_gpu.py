"""Host memory, a disk and other engines behind the caches of ranks: on a GPU each, or by turns on
one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_ranks_on_disk import swap_for_ever
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.small_models import Answer, SmallEngine

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(12)
PROMPTS = [RNG.integers(3, 512, 300).tolist() for _ in range(8)]
NUM_CACHED = 288
# Half of them without log probabilities: ranks then exchange their best tokens alone.
SAMPLINGS = [
    SamplingParams(temperature=0.8, seed=seed, max_tokens=16, num_logprobs=2 if seed % 2 else None)
    for seed in range(len(PROMPTS))
]
SIZES: dict[str, Any] = {"device": "cuda", "max_num_batched_tokens": 512, "max_num_seqs": 8}
SIZES |= {"block_size": 16, "max_model_len": 400}
TWO = {"tensor_parallel_size": 2}
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
ROOMY = {"num_blocks": 200}
TIGHT = {"num_blocks": 30}
MEMORY = 64 << 20
NONE = np.empty(0, np.int32)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")
    return folder


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[SmallEngine]:
    one = SmallEngine(folder, **SIZES | TWO | options)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> list[Answer]:
    """Answers of two ranks whose cache holds everything."""
    with pytest.MonkeyPatch.context() as patch:
        share_unless(2, patch)
        with engine(qwen3, **ROOMY) as two:
            answers = two.answer(PROMPTS, *SAMPLINGS)
            assert two.engine.load().num_preemptions == 0
    return answers


def check_same(answers: list[Answer], expected: list[Answer]) -> None:
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert [each.logprobs for each in answers] == [each.logprobs for each in expected]


def test_preempted_requests_go_on_from_host_memory(qwen3: Path) -> None:
    prompts = [prompt[:60] for prompt in PROMPTS[:6]]
    samplings = [replace(each, max_tokens=60) for each in SAMPLINGS[:6]]
    with engine(qwen3, **ROOMY) as two:
        known = two.answer(prompts, *samplings)
        assert two.engine.load().num_preemptions == 0
    with engine(qwen3, kv_swap_memory=MEMORY, num_blocks=26) as two:
        check_same(two.answer(prompts, *samplings), known)
        load = two.engine.load()
    assert load.num_preemptions > 0
    assert load.num_swapped_in > 0
    assert load.num_used_blocks == 0


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, STAGES, STAGES | TWO], ids=str)
def test_forgotten_prompts_come_back_from_host_memory(
    options: dict[str, Any], qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TWO | options
    share_unless(
        options["tensor_parallel_size"] * options.get("pipeline_parallel_size", 1), monkeypatch
    )
    with engine(qwen3, **ROOMY | options) as two:
        expected = two.answer(PROMPTS, *SAMPLINGS)
    with engine(qwen3, kv_swap_memory=MEMORY, **TIGHT | options) as two:
        assert isinstance(two.executor, MultiExecutor)
        assert two.executor.swapper is not None
        assert two.executor.swapper.seconds_per_block > 0
        check_same(two.answer(PROMPTS, *SAMPLINGS), expected)
        again = two.answer(PROMPTS, *SAMPLINGS)
        load = two.engine.load()
    check_same(again, expected)
    # More than the caches hold: it came from elsewhere.
    assert (
        sum(answer.cached_tokens for answer in again)
        > 2 * TIGHT["num_blocks"] * SIZES["block_size"]
    )
    assert load.num_swapped_in > 0
    assert load.num_used_blocks == 0


def test_blocks_of_ranks_on_a_disk_outlive_the_engine(
    qwen3: Path, expected: list[Answer], tmp_path: Path
) -> None:
    for life in range(2):
        with engine(qwen3, kv_disk_dir=tmp_path, **TIGHT) as two:
            two.settle()
            for number, known in enumerate(expected[:4]):
                [answer] = two.answer([PROMPTS[number]], SAMPLINGS[number])
                two.settle()
                check_same([answer], [known])
                assert answer.cached_tokens == (NUM_CACHED if life else 0)
            if life:
                assert two.engine.load().hits_by_tier == {"disk": 4 * NUM_CACHED}


def test_engines_of_two_ranks_pull_blocks_as_records(qwen3: Path, expected: list[Answer]) -> None:
    """The first has host memory behind its cache, and lends from there too."""
    link = DirectLink()
    memory = {"kv_peer_memory": MEMORY}
    with (
        engine(qwen3, link=link, address="a", kv_swap_memory=MEMORY, **memory, **TIGHT) as owner,
        engine(qwen3, link=link, address="b", **memory, **ROOMY) as puller,
    ):
        check_same(owner.answer(PROMPTS, *SAMPLINGS), expected)
        for number, known in enumerate(expected):
            holder = Holder(address="a", epoch=1, num_tokens=len(PROMPTS[number]))
            [answer] = puller.answer([PROMPTS[number]], SAMPLINGS[number], holder=holder)
            check_same([answer], [known])
            assert answer.cached_tokens == NUM_CACHED
        pulls = puller.engine.load().peers
        lent = owner.engine.load().peers
    assert pulls is not None
    assert lent is not None
    assert (pulls.num_pulled, pulls.num_direct) == (len(PROMPTS) * NUM_CACHED, 0)
    assert lent.num_lent_from_tiers > 0


def test_a_rank_that_dies_while_blocks_are_copied_ends_the_engine(
    qwen3: Path, expected: list[Answer]
) -> None:
    with engine(qwen3, kv_swap_memory=MEMORY, **TIGHT) as two:
        two.answer(PROMPTS[:1], SAMPLINGS[0])
        assert isinstance(two.executor, MultiExecutor)
        assert two.executor.swapper is not None
        blocks = np.arange(1, 20, dtype=np.int32)
        plan = SwapPlan(out_blocks=blocks, out_slots=blocks, in_slots=NONE, in_blocks=NONE)
        two.executor.swapper.swap(plan)
        os.kill(two.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            swap_for_ever(two.executor.swapper, plan)
    # What the dead rank had locked is free: the next engine locks as much.
    with engine(qwen3, kv_swap_memory=MEMORY, **TIGHT) as two:
        check_same(two.answer(PROMPTS[:1], SAMPLINGS[0]), expected[:1])
