"""A draft model of the first pipeline stage on GPUs, or on one GPU, by turns: answers have the bits
of the same stages without drafts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.executors.multi import MultiExecutor
from headwater.engine_core.rank_facts import RankLost
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_drafts_of_ranks_on_gpu import (
    ASKED,
    PROMPTS,
    check_drafts,
    ranks_of,
)
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.small_models import convert, greedy, random_checkpoint
from tests.engine_core.test_draft_model import WholeDrafts

pytestmark = pytest.mark.gpu

STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")[1]


@pytest.mark.parametrize("access", ["auto", "off"])
def test_guesses_of_the_first_stage_change_no_bit(
    access: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    with ranks_of(folder, tensor_parallel_size=1) as one:
        expected, _ = answers_of_a_new_engine(one, PROMPTS, ASKED)
    with ranks_of(folder, draft_model=folder, peer_access=access, **STAGES) as engine:
        assert isinstance(engine.executor, MultiExecutor)
        # The draft model is the served one.
        for load in check_drafts(engine):
            assert load.num_accepted_tokens > 0.6 * load.num_draft_tokens
        answers, _ = answers_of_a_new_engine(engine, PROMPTS, ASKED)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]


@pytest.mark.parametrize(
    "options", [{"async_depth": 4}, {"num_blocks": 14}, {"numerics": "tree"}], ids=str
)
def test_however_an_engine_is_set(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    with ranks_of(folder, draft_model=folder, **STAGES, **options) as engine:
        check_drafts(engine)


def test_a_draft_model_of_another_kind_changes_no_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    random_checkpoint("gemma3", tmp_path / "hf")
    draft = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    with ranks_of(folder, draft_model=draft, **STAGES) as engine:
        check_drafts(engine)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2)])
def test_more_stages_and_ranks_of_each(
    sizes: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(sizes[0] * sizes[1], monkeypatch)
    layout = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with ranks_of(folder, draft_model=folder, **layout) as engine:
        for load in check_drafts(engine):
            assert load.num_accepted_tokens > 0.6 * load.num_draft_tokens


def test_the_death_of_the_stage_that_drafts_ends_the_executor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    with ranks_of(folder, draft_model=folder, **STAGES) as engine:
        answers_of_a_new_engine(
            engine, PROMPTS[:1], [greedy(4)], WholeDrafts().beside(engine.config)
        )
        assert isinstance(engine.executor, MultiExecutor)
        os.kill(engine.executor.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 0 was ended by SIGKILL"):
            answers_of_a_new_engine(
                engine, PROMPTS, [greedy(200)], WholeDrafts(is_ahead=True).beside(engine.config)
            )
