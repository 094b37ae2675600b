"""The layer for multi-token prediction of a checkpoint drafts on a GPU: what its published
definition drafts, and answers stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.bench.forced_answers import ForcedAnswers
from headwater.engine_core.options import MTP
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.many_requests import check_equality
from tests.engine_core.mtp_checkpoints import OneLayer, mtp_checkpoint
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.small_models import SmallEngine, convert, greedy
from tests.engine_core.test_cuda_states import SIZES
from tests.engine_core.test_draft_heads import half_right
from tests.engine_core.test_draft_heads_on_gpu import Recorder, num_equal
from tests.engine_core.test_draft_model import MAX_DRAFTS, PROMPTS, WholeDrafts
from tests.engine_core.test_draft_model_on_gpu import SEEDED, check_drafts
from tests.engine_core.test_drafts_on_gpu import EVERY_SAMPLING, prompts_of
from tests.engine_core.test_mtp import predictive, swap_halves

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3.5", "qwen3.5-moe")


def engine(folder: Path, **options: Any) -> SmallEngine:
    given = {
        "device": "cuda",
        "block_size": 16,
        "num_blocks": 900,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "speculation": MTP,
        "max_draft_tokens": MAX_DRAFTS,
    }
    return SmallEngine(folder, **given | options)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_a_twin_behind_chunks_drafts_and_cached_prefixes(
    tmp_path: Path, family: str
) -> None:
    """With fewer bits a draft may be another of two that are nearly equal."""
    twin = mtp_checkpoint(family, tmp_path / "hf", **SIZES).rounded()
    length = 40
    forced = ForcedAnswers(64)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 512, n).tolist() for n in (5, 31, 40)]
    answers = [half_right(twin, prompt, length) for prompt in prompts]
    forced.expect(dict(enumerate(answers, start=1)))
    with forced.installed():
        folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
        small = engine(folder, max_num_batched_tokens=24, max_num_seqs=8)
    # Bytes of states may be no numbers in the dtype of keys and values.
    memory = small.executor.kv_caches[0].untyped_storage()
    torch.tensor([], dtype=torch.uint8, device="cuda").set_(memory).fill_(0xFF)
    samplings = [greedy(length, seed=seed) for seed in (1, 2, 3)]
    ahead = WholeDrafts(is_ahead=True).beside(small.config)
    reported, load_ahead = answers_of_a_new_engine(small, prompts, samplings, ahead, num_rounds=2)
    assert [answer.token_ids for answer in reported] == answers * 2
    recorder = Recorder(small)
    reported, load = answers_of_a_new_engine(
        small, prompts, samplings, WholeDrafts().beside(small.config), num_rounds=2
    )
    small.close()
    assert [answer.token_ids for answer in reported] == answers * 2
    assert max(answer.cached_tokens for answer in reported[3:]) >= 32
    noted = [(known, drafts) for known, drafts in recorder.noted if len(drafts) == MAX_DRAFTS]
    right = [num_equal(drafts, twin.drafts(known, MAX_DRAFTS)) for known, drafts in noted]
    assert len(right) > 20
    assert sum(right) > 0.6 * MAX_DRAFTS * len(right)
    for each in (load, load_ahead):
        # Half of the answers' tokens are those of the twin, and bf16 moves some drafts.
        assert 0.2 * each.num_draft_tokens < each.num_accepted_tokens < 0.9 * each.num_draft_tokens


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [(lambda layer: None, 0.95, 1.0), (swap_halves, 0.0, 0.25)],
    ids=["as it is", "halves of fc swapped"],
)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
def test_a_layer_that_predicts_is_right_and_one_with_a_planted_fault_is_not(
    tmp_path: Path,
    change: Callable[[OneLayer], None],
    least: float,
    most: float,
    is_ahead: bool,
) -> None:
    samplings = [SamplingParams(temperature=1.0, seed=seed, max_tokens=90) for seed in range(6)]
    with closing(engine(predictive(tmp_path, change, "bfloat16", **SIZES))) as small:
        plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
        speculator = WholeDrafts(is_ahead=is_ahead).beside(small.config)
        answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, speculator)
    assert answers == plain
    assert load.num_draft_tokens > 100
    assert least <= load.num_accepted_tokens / load.num_draft_tokens <= most


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_every_sampling_are_those_without_the_layer(tmp_path: Path, family: str) -> None:
    mtp_checkpoint(family, tmp_path / "hf", **SIZES)
    with closing(engine(convert(tmp_path / "hf", tmp_path / "ours", "bfloat16"))) as small:
        prompts = prompts_of([1 + i * 37 % 200 for i in range(24)])
        check_drafts(small, prompts, EVERY_SAMPLING)
        check_drafts(small, prompts, SEEDED, num_rounds=2)


def test_the_layer_changes_none_of_many_requests(tmp_path: Path) -> None:
    mtp_checkpoint("qwen3.5", tmp_path / "hf", **SIZES)
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    with closing(engine(folder, speculation="off")) as roomy:
        crowded = engine(folder, num_blocks=120, max_model_len=256)
        load = check_equality(roomy, crowded, 200, has_draft_model=True, name=MTP)
        crowded.close()
    assert load.num_draft_tokens > 200
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0
