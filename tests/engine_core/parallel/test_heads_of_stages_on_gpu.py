"""Draft heads of the first pipeline stage on GPUs, or on one GPU, by turns: guesses are those of
one process, and answers have the bits of the same stages without drafts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.executors.multi import MultiExecutor
from headwater.engine_core.rank_facts import RankLost
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_drafts_of_ranks_on_gpu import (
    ASKED,
    HEADS,
    PROMPTS,
    check_drafts,
    heads_of,
    ranks_of,
)
from tests.engine_core.parallel.test_stage_hosts_on_gpu import hosts_of
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.small_models import Answer, SmallEngine, greedy
from tests.engine_core.test_draft_model import WholeDrafts

pytestmark = pytest.mark.gpu

FEW_TOKENS = {41: 60.0, 42: 60.0, 45: 60.0, 46: 60.0}
"""A bias to tokens that all heads guess."""
OF_FEW_TOKENS = [
    SamplingParams(max_tokens=40, temperature=0.7 * (i % 2), seed=i, logit_bias=FEW_TOKENS)
    for i in range(len(PROMPTS))
]
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"async_depth": 4}),
    ("eagle", {"max_num_seqs": 3}),
    ("eagle3", {"num_blocks": 14}),
    ("eagle3", {"async_depth": 4, "peer_access": "off"}),
    ("medusa", {"async_depth": 4}),
    ("eagle", {"numerics": "tree"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")[1]


def told(answers: list[Answer]) -> list[object]:
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def counts(engine: SmallEngine) -> list[tuple[int, int]]:
    """Drafts of each answer, and those accepted. Even random heads guess every eighth of few
    tokens, and others where they read other hidden states. One answer follows another: of several
    at once a step verifies fewer drafts."""
    found = []
    for prompt, sampling in zip(PROMPTS, OF_FEW_TOKENS, strict=True):
        speculator = WholeDrafts().beside(engine.config)
        _, load = answers_of_a_new_engine(engine, [prompt], [sampling], speculator)
        found.append((load.num_draft_tokens, load.num_accepted_tokens))
    return found


@pytest.mark.parametrize("kind", HEADS)
def test_the_first_stage_guesses_as_one_process_does_and_no_bit_changes(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    heads = heads_of(kind, tmp_path)
    with ranks_of(folder, tensor_parallel_size=1, draft_heads=heads) as one:
        expected = told(answers_of_a_new_engine(one, PROMPTS, ASKED)[0])
        guessed = counts(one)
    assert len({accepted for _, accepted in guessed} - {0}) > 1
    for access in ("auto", "off"):
        with ranks_of(folder, draft_heads=heads, peer_access=access, **STAGES) as engine:
            assert isinstance(engine.executor, MultiExecutor)
            assert counts(engine) == guessed
            check_drafts(engine)
            assert told(answers_of_a_new_engine(engine, PROMPTS, ASKED)[0]) == expected


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_however_an_engine_is_set(
    kind: str,
    options: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share_unless(2, monkeypatch)
    with ranks_of(folder, draft_heads=heads_of(kind, tmp_path), **STAGES, **options) as engine:
        check_drafts(engine)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("eagle3", (1, 3)), ("eagle", (2, 2)), ("medusa", (2, 2))]
)
def test_more_stages_and_ranks_of_each(
    kind: str, sizes: tuple[int, int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(sizes[0] * sizes[1], monkeypatch)
    layout = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    heads = heads_of(kind, tmp_path)
    with ranks_of(folder, draft_heads=heads, tensor_parallel_size=sizes[0]) as one:
        guessed = counts(one)
    with ranks_of(folder, draft_heads=heads, **layout) as engine:
        assert counts(engine) == guessed
        check_drafts(engine)


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        ("eagle", (2, 1, 1), {}),
        ("eagle3", (3, 2, 1), {"async_depth": 4}),
        ("eagle3", (3, 1, 1), {}),
        ("medusa", (2, 1, 2), {}),
    ],
    ids=str,
)
def test_stages_on_other_hosts_show_the_first_one_what_heads_read(
    kind: str,
    layout: tuple[int, int, int],
    options: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, num_hosts, tensor = layout
    share_unless(tensor, monkeypatch)
    heads = heads_of(kind, tmp_path)
    with ranks_of(folder, draft_heads=heads, tensor_parallel_size=tensor) as one:
        expected = told(answers_of_a_new_engine(one, PROMPTS, ASKED)[0])
        guessed = counts(one)
    hosts = hosts_of(folder, tmp_path, monkeypatch, size=size, num_hosts=num_hosts, tensor=tensor)
    with hosts as (stages, _), ranks_of(folder, draft_heads=heads, **stages, **options) as engine:
        assert counts(engine) == guessed
        check_drafts(engine)
        assert told(answers_of_a_new_engine(engine, PROMPTS, ASKED)[0]) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_stage_ends_the_executor(
    rank: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_unless(2, monkeypatch)
    with ranks_of(folder, draft_heads=heads_of("eagle", tmp_path), **STAGES) as engine:
        answers_of_a_new_engine(
            engine, PROMPTS[:1], [greedy(4)], WholeDrafts().beside(engine.config)
        )
        assert isinstance(engine.executor, MultiExecutor)
        os.kill(engine.executor.ranks.pids[rank], signal.SIGKILL)
        with pytest.raises(RankLost, match=f"rank {rank} was ended by SIGKILL"):
            answers_of_a_new_engine(
                engine, PROMPTS, [greedy(200)], WholeDrafts(is_ahead=True).beside(engine.config)
            )
