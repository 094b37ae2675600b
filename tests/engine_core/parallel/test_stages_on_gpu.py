"""Engines whose layers follow one another on several GPUs, or by turns on one, beside one
process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.executors.ranks.rank_devices import SHARE
from headwater.engine_core.parallel.rank_facts import RankLost
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_pipeline_parallel import reported
from tests.engine_core.parallel.test_ranks_on_gpu import engine
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLINGS
from tests.engine_core.small_models import greedy
from tests.engine_core.test_device_drafts_on_gpu import GREEDY, PLAIN, check_own_drafts
from tests.engine_core.test_drafts_on_gpu import MAX_DRAFTS, prompts_of

pytestmark = pytest.mark.gpu

SCORED = greedy(12, num_logprobs=3, num_prompt_logprobs=1)


@pytest.fixture(autouse=True)
def _enough_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)


def share_unless(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take turns on one GPU unless there are so many."""
    if torch.cuda.device_count() < num_gpus:
        monkeypatch.setenv(SHARE, "1")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")


@pytest.mark.parametrize(("size", "access"), [(2, "auto"), (3, "auto"), (3, "off")])
def test_stages_answer_to_the_bit_as_one_process(
    size: int, access: str, qwen3: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(size, monkeypatch)
    with (
        engine(qwen3[1]) as one,
        engine(qwen3[1], pipeline_parallel_size=size, peer_access=access) as several,
    ):
        assert isinstance(several.executor, MultiExecutor)
        assert reported(several.answer(PROMPTS, SCORED)) == reported(one.answer(PROMPTS, SCORED))
        assert reported(several.answer(PROMPTS, *SAMPLINGS)) == reported(
            one.answer(PROMPTS, *SAMPLINGS)
        )
        # More requests than seats: rows are given to others while their last tokens are on the way.
        many = [prompt[:20] for prompt in PROMPTS] * 16
        lengths = [greedy(1 + i % 7) for i in range(len(many))]
        assert reported(several.answer(many, *lengths)) == reported(one.answer(many, *lengths))


def test_another_family_answers_to_the_bit_as_one_process(tmp_path: Path) -> None:
    _, folder = folder_of("gemma3 of 4 and 2 heads", tmp_path, "bfloat16")
    with engine(folder) as one, engine(folder, pipeline_parallel_size=2) as two:
        assert reported(two.answer(PROMPTS, SCORED)) == reported(one.answer(PROMPTS, SCORED))


@pytest.mark.parametrize("access", ["auto", "off"])
def test_shards_of_stages_answer_as_shards_of_one_stage(
    access: str, qwen3: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(4, monkeypatch)
    with engine(qwen3[1], tensor_parallel_size=2) as two:
        expected = [reported(two.answer(PROMPTS, *asked)) for asked in ((SCORED,), SAMPLINGS)]
    with engine(
        qwen3[1], tensor_parallel_size=2, pipeline_parallel_size=2, peer_access=access
    ) as four:
        assert [
            reported(four.answer(PROMPTS, *asked)) for asked in ((SCORED,), SAMPLINGS)
        ] == expected


@pytest.mark.parametrize(("num_rows", "access"), [(1, "auto"), (40, "auto"), (40, "off")])
def test_answers_are_those_without_drafts(
    num_rows: int, access: str, qwen3: tuple[Any, Path]
) -> None:
    """Looked up by the devices or told by the host, ahead of what is known here."""
    prompts = prompts_of([1 + i * 37 % 200 for i in range(num_rows)])
    sizes = {
        "max_num_seqs": 40,
        "num_blocks": 400,
        "max_draft_tokens": MAX_DRAFTS,
        "async_depth": 4,
    }
    with engine(qwen3[1], pipeline_parallel_size=2, peer_access=access, **sizes) as two:
        check_own_drafts(two, prompts, PLAIN if num_rows > 1 else [GREEDY])


def test_the_death_of_a_stage_ends_the_executor(qwen3: tuple[Any, Path]) -> None:
    with engine(qwen3[1], pipeline_parallel_size=2) as two:
        two.tokens(PROMPTS[:1], greedy(2))
        assert isinstance(two.executor, MultiExecutor)
        os.kill(two.executor.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 0 was ended by SIGKILL"):
            two.tokens(PROMPTS, greedy(200))
