"""Engines whose layers follow one another in several processes, beside one process: every bit is
the same."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.scheduling.rows.pipeline_groups import PipelineGroups
from headwater.engine_core.weights.shards import Stage, stages
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLINGS
from tests.engine_core.small_models import Answer, check_scores, greedy
from tests.long_values import long_but
from tests.polling import holds_within


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))


def reported(answers: list[Answer]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in answers]


@pytest.mark.parametrize("size", long_but((2, 3), 3))
def test_stages_answer_to_the_bit_as_one_process(size: int, qwen3: tuple[Any, Path]) -> None:
    scored = greedy(12, num_logprobs=3, num_prompt_logprobs=1)
    with engine_of(qwen3[1]) as one, engine_of(qwen3[1], pipeline_parallel_size=size) as several:
        assert reported(several.answer(PROMPTS, scored)) == reported(one.answer(PROMPTS, scored))
        assert reported(several.answer(PROMPTS, *SAMPLINGS)) == reported(
            one.answer(PROMPTS, *SAMPLINGS)
        )
        # More requests than seats: rows are given to others while their last tokens are on the way.
        many = [prompt[:20] for prompt in PROMPTS] * 16
        lengths = [greedy(1 + i % 7) for i in range(len(many))]
        assert reported(several.answer(many, *lengths)) == reported(one.answer(many, *lengths))


@pytest.mark.long
@pytest.mark.parametrize("family", ["smollm2", "gemma3 of 4 and 2 heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_families_answer_to_the_bit_as_one_process(
    family: str, dtype: str, tmp_path: Path
) -> None:
    _, folder = folder_of(family, tmp_path, dtype)
    scored = greedy(12, num_logprobs=3, num_prompt_logprobs=1)
    with engine_of(folder) as one, engine_of(folder, pipeline_parallel_size=2) as two:
        assert reported(two.answer(PROMPTS, scored)) == reported(one.answer(PROMPTS, scored))


@pytest.mark.long
def test_shards_of_stages_answer_as_transformers(qwen3: tuple[Any, Path]) -> None:
    model, folder = qwen3
    with engine_of(folder, tensor_parallel_size=2, pipeline_parallel_size=2) as four:
        answers = four.answer(PROMPTS, greedy(12, num_logprobs=3, num_prompt_logprobs=0))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 12)


def test_layers_are_divided_such_that_the_largest_stage_is_as_small_as_can_be() -> None:
    assert stages([1] * 4, 0, 0, 2) == [Stage(0, 2, 4), Stage(2, 4, 4)]
    # A head as large as two layers leaves the last stage fewer of them.
    assert stages([1] * 6, 0, 2, 2) == [Stage(0, 4, 6), Stage(4, 6, 6)]
    assert stages([5, 1, 1, 1, 5], 0, 0, 3) == [Stage(0, 1, 5), Stage(1, 4, 5), Stage(4, 5, 5)]
    assert stages([1] * 3, 9, 9, 3) == [Stage(0, 1, 3), Stage(1, 2, 3), Stage(2, 3, 3)]
    assert stages([7], 1, 1, 1) == [Stage(0, 1, 1)]


def test_rows_are_in_disjoint_groups_of_nearly_one_size() -> None:
    groups = PipelineGroups(3, 20)
    seated = []
    for row in range(11):
        while not groups.has_room(11):
            groups.advance()
        groups.seat(row)
        seated.append(row)
    found = []
    for _ in range(3):
        groups.advance()
        found.append(groups.of_turn(np.array(seated)).tolist())
    assert sorted(chain(*found)) == seated
    assert sorted(map(len, found)) == [3, 4, 4]
    groups.leave(found[0][0])
    groups.leave(found[0][1])
    assert groups.has_room(9) is (len(found[2]) < 3)


def test_stages_compute_different_groups_at_the_same_time(qwen3: tuple[Any, Path]) -> None:
    """Half of the requests a step, and as many steps in flight as stages."""
    with engine_of(qwen3[1], pipeline_parallel_size=2) as two, engine_of(qwen3[1]) as one:
        for engine in (one, two):
            engine.answer([[5, 6, 7, i] for i in range(8)], greedy(20))
        assert (two.config.num_groups, two.config.async_depth) == (2, 2)
        executor = two.executor
        assert isinstance(executor, MultiExecutor)
        # The stages behind the first one may answer before the first one counts the plan.
        assert holds_within(
            lambda: executor.rank_figures()[0].num_plans == executor.ranks._num_sent, 30
        )
        num_plans = executor.rank_figures()[0].num_plans
    # Eight requests in two groups of four: twice as many steps as tokens, and some at the end whose
    # tokens are late.
    assert 40 <= num_plans <= 48


def test_more_stages_than_steps_in_flight_or_layers_are_refused(qwen3: tuple[Any, Path]) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 5; allowed: 1…4 for 4 layers"):
        build_executor(
            ExecutorOptions(model_folder=qwen3[1], pipeline_parallel_size=5),
            lambda phase, done, total: None,
        )
