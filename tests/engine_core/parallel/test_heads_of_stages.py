"""Draft heads beside pipeline stages on a CPU: guesses, tokens and log probabilities are those of
one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.heads_twin import HeadsTwin
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import engine_of, folder_of
from tests.engine_core.parallel.test_drafts_of_ranks import (
    ASKED,
    DRAFTED,
    STAGES,
    heads_of,
    threads_of,
    token_ids,
)
from tests.engine_core.published_heads import CONFIGS, random_heads
from tests.engine_core.small_models import greedy
from tests.engine_core.test_draft_heads import Recorder
from tests.engine_core.test_draft_model import PROMPTS, WholeDrafts
from tests.long_values import long_but

HEADED = [(kind, sizes) for sizes in STAGES for kind in CONFIGS]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of("qwen3", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def folder(served: tuple[Any, Path]) -> Path:
    return served[1]


@pytest.mark.parametrize("headed", long_but(HEADED, ("eagle", (1, 2)), ("eagle3", (1, 3))))
def test_heads_beside_stages_guess_as_in_one_process_and_change_no_bit(
    headed: tuple[str, tuple[int, int]], folder: Path, tmp_path: Path
) -> None:
    kind, sizes = headed
    asked = [replace(each, num_logprobs=2) for each in ASKED]
    heads = heads_of(kind, tmp_path)
    layout = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    told = list[Any]()
    counted = list[tuple[int, int]]()
    # Sums of several ranks are rounded in another order than those of one: guesses are those of as
    # many.
    for options in (DRAFTED | {"tensor_parallel_size": sizes[0]}, DRAFTED | layout):
        with engine_of(folder, draft_heads=heads, **options) as engine:
            for is_ahead in (False, True):
                speculator = WholeDrafts(is_ahead=is_ahead).beside(engine.config)
                answers, load = answers_of_a_new_engine(
                    engine, PROMPTS, asked, speculator, num_rounds=2
                )
                told.append((token_ids(answers), [each.logprobs for each in answers]))
                counted.append((load.num_draft_tokens, load.num_accepted_tokens))
    assert told[0] == told[1] == told[2] == told[3]
    assert counted[0] == counted[2]
    assert min(counted)[0] > 50


@pytest.mark.parametrize(
    "headed", long_but(HEADED, *((kind, (1, 3)) for kind in ("medusa", "eagle", "eagle3")))
)
def test_the_first_stage_guesses_what_the_published_definition_guesses(
    headed: tuple[str, tuple[int, int]], served: tuple[Any, Path], tmp_path: Path
) -> None:
    kind, sizes = headed
    twin = HeadsTwin(served[0], CONFIGS[kind], random_heads(kind))
    prompts = PROMPTS[1:4]
    layout = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    with threads_of(served[1], draft_heads=heads_of(kind, tmp_path), **layout) as engine:
        recorder = Recorder(engine.ranks.ranks[0])
        answers_of_a_new_engine(engine, prompts, [greedy(12)], WholeDrafts().beside(engine.config))
    assert len(recorder.noted) > 10
    for known, guesses in recorder.noted:
        assert guesses == twin.guesses(known, len(guesses))


@pytest.mark.long
@pytest.mark.parametrize("numerics", ["default", "tree"])
@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_heads_beside_stages_guess_by_tied_heads_and_beside_tree_numerics(
    family: str, numerics: str, tmp_path: Path
) -> None:
    _, folder = folder_of(family, tmp_path)
    found = []
    options = DRAFTED | {"draft_heads": heads_of("eagle", tmp_path), "numerics": numerics}
    for size in (1, 2):
        with engine_of(
            folder, **options | {"tensor_parallel_size": 1, "pipeline_parallel_size": size}
        ) as engine:
            speculator = WholeDrafts().beside(engine.config)
            answers, load = answers_of_a_new_engine(engine, PROMPTS, ASKED, speculator)
            found.append((token_ids(answers), load.num_draft_tokens, load.num_accepted_tokens))
    assert found[0] == found[1]
    assert found[0][1] > 50


@pytest.mark.parametrize("kind", long_but(("eagle", "eagle3"), "eagle"))
def test_planes_of_heads_beside_stages_come_back_from_the_disk_as_those_of_one_process(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    few = {
        "num_blocks": 18,
        "max_model_len": 160,
        "draft_heads": heads_of(kind, tmp_path),
        "tensor_parallel_size": 1,
    }
    prompts = [PROMPTS[-1], *([i + 3] * 100 for i in range(4)), PROMPTS[-1]]
    found = []
    for size in (1, 2):
        options = (
            DRAFTED | few | {"pipeline_parallel_size": size, "kv_disk_dir": tmp_path / str(size)}
        )
        with engine_of(
            folder, speculate=lambda config: WholeDrafts().beside(config), **options
        ) as engine:
            for prompt in prompts:
                [answer] = engine.answer([prompt], greedy(40))
                engine.settle()
                load = engine.engine.load()
                drafts = load.num_draft_tokens, load.num_accepted_tokens
                found.append((answer.token_ids, answer.cached_tokens, drafts))
            assert engine.engine.load().hits_by_tier == {"disk": 96}
    assert found[: len(prompts)] == found[len(prompts) :]
