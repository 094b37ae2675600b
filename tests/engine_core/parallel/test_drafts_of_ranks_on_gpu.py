"""A draft model and draft heads beside ranks on GPUs, or on one GPU, by turns: answers have the
bits that the same ranks give without drafts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.executors.ranks.rank_devices import SHARE
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import EngineLoad
from tests.engine_core.oracle_speculator import SAMPLINGS, answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_draft_model import MAX_DRAFTS, WholeDrafts

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 512, n).tolist() for n in (1, 17, 64, 90, 200, 300)]
LENGTHS = (24, 20, 30, 12, 16, 9)
ASKED = [
    SamplingParams(max_tokens=n, **SAMPLINGS[kind])
    for n, kind in zip(LENGTHS, [kind for kind in SAMPLINGS if kind != "a stop"], strict=True)
]
SMALL = {
    "device": "cuda",
    "block_size": 64,
    "num_blocks": 60,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "max_draft_tokens": MAX_DRAFTS,
}
HEADS = {"medusa": CONFIGS["medusa"], "eagle": CONFIGS["eagle"]} | {
    # The layers that EAGLE-3 takes by itself are fewer than three in a model of four.
    "eagle3": CONFIGS["eagle3"] | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
}
NUM_GPUS = torch.cuda.device_count()
SIZES = [
    2,
    pytest.param(
        4, marks=pytest.mark.skipif(NUM_GPUS < 4, reason="four ranks take minutes on fewer GPUs")
    ),
]


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if NUM_GPUS < 2:
        monkeypatch.setenv(SHARE, "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")[1]


@contextmanager
def ranks_of(folder: Path, **options: Any) -> Iterator[SmallEngine]:
    engine = SmallEngine(folder, **SMALL | {"tensor_parallel_size": 2} | options)
    try:
        yield engine
    finally:
        engine.close()


def heads_of(kind: str, path: Path) -> Path:
    return publish(path / kind, HEADS[kind], random_heads(kind))


def check_drafts(engine: SmallEngine) -> list[EngineLoad]:
    """Of rows that wait for results and of rows that run ahead; the second round finds prefixes,
    and all graphs."""
    plain, _ = answers_of_a_new_engine(engine, PROMPTS, ASKED)
    loads = []
    for is_ahead in (False, True):
        speculator = WholeDrafts(is_ahead=is_ahead).beside(engine.config)
        answers, load = answers_of_a_new_engine(engine, PROMPTS, ASKED, speculator, num_rounds=2)
        assert [answer.token_ids for answer in answers] == [
            answer.token_ids for answer in plain
        ] * 2
        assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in plain] * 2
        assert load.num_draft_tokens > 50
        loads.append(load)
    return loads


@pytest.mark.parametrize("size", SIZES)
def test_drafts_of_the_served_model_itself_are_accepted(size: int, folder: Path) -> None:
    with ranks_of(folder, draft_model=folder, tensor_parallel_size=size) as engine:
        assert isinstance(engine.executor, MultiExecutor)
        # Two ranks round the sums of the served model in another order than the draft model's are.
        for load in check_drafts(engine):
            assert load.num_accepted_tokens > 0.6 * load.num_draft_tokens


def test_a_draft_model_that_ranks_could_not_divide_changes_no_bit(
    folder: Path, tmp_path: Path
) -> None:
    random_checkpoint("gemma3", tmp_path / "hf")
    with ranks_of(
        folder, draft_model=convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    ) as engine:
        check_drafts(engine)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", HEADS)
def test_heads_change_no_bit(kind: str, size: int, folder: Path, tmp_path: Path) -> None:
    with ranks_of(
        folder, draft_heads=heads_of(kind, tmp_path), tensor_parallel_size=size
    ) as engine:
        check_drafts(engine)


@pytest.mark.parametrize("what", ["draft model", "medusa", "eagle3"])
def test_drafts_beside_tree_numerics_change_no_bit_on_any_number_of_ranks(
    what: str, folder: Path, tmp_path: Path
) -> None:
    drafting = (
        {"draft_model": folder}
        if what == "draft model"
        else {"draft_heads": heads_of(what, tmp_path)}
    )
    with ranks_of(folder, numerics="tree", tensor_parallel_size=1) as one:
        expected, _ = answers_of_a_new_engine(one, PROMPTS, ASKED)
    for size in (1, 2):
        with ranks_of(folder, numerics="tree", tensor_parallel_size=size, **drafting) as engine:
            check_drafts(engine)
            answers, _ = answers_of_a_new_engine(engine, PROMPTS, ASKED)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]


@pytest.mark.parametrize("options", [{"async_depth": 4}, {"num_blocks": 14}], ids=str)
def test_however_an_engine_is_set(options: dict[str, Any], folder: Path) -> None:
    with ranks_of(folder, draft_model=folder, **options) as engine:
        check_drafts(engine)


def test_the_memory_of_a_cache_counts_the_planes_of_what_drafts_on_every_rank(folder: Path) -> None:
    sized = {"num_blocks": 0, "kv_cache_memory": 64 << 20}
    with ranks_of(folder, **sized) as engine:
        plain = engine.config.num_blocks
    with ranks_of(folder, draft_model=folder, **sized) as engine:
        assert engine.config.num_blocks == plain // 3


@pytest.mark.parametrize("what", ["draft_model", "draft_heads"])
def test_the_death_of_a_rank_that_drafts_ends_the_executor(
    what: str, folder: Path, tmp_path: Path
) -> None:
    drafting = {what: folder if what == "draft_model" else heads_of("eagle", tmp_path)}
    with ranks_of(folder, **drafting) as engine:
        answers_of_a_new_engine(
            engine, PROMPTS[:1], [greedy(4)], WholeDrafts().beside(engine.config)
        )
        assert isinstance(engine.executor, MultiExecutor)
        os.kill(engine.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            answers_of_a_new_engine(
                engine, PROMPTS, [greedy(200)], WholeDrafts(is_ahead=True).beside(engine.config)
            )


def test_heads_that_do_not_fit_are_refused_before_the_engine_serves(
    folder: Path, tmp_path: Path
) -> None:
    heads = publish(
        tmp_path / "heads", CONFIGS["eagle with biases"], random_heads("eagle with biases")
    )
    with pytest.raises(
        ConfigError, match=r"draft_heads is .*; allowed: heads with 2 query heads a key head"
    ):
        SmallEngine(folder, **SMALL, tensor_parallel_size=2, draft_heads=heads)
