"""Steps that are computed before an engine serves: they touch what real ones touch, and leave
nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan, Executor, StepPlan
from headwater.engine_core.executors.device import warmup_plans as plans
from headwater.engine_core.executors.device.warmup_plans import warmup_plans
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint

PROMPTS = [[5, 6, 7, 8] * 12, [9, 10, 11] * 9]
SAMPLED = SamplingParams(temperature=0.9, seed=3, top_p=0.9, presence_penalty=0.3, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("small")
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours")


def test_answers_are_the_same_and_nothing_is_cached_after_it(folder: Path) -> None:
    cold = SmallEngine(folder)
    warm = SmallEngine(folder)
    warm.executor.warm_up()
    assert warm.engine.load() == cold.engine.load()
    reported = warm.answer(PROMPTS, SAMPLED)
    assert [answer.token_ids for answer in reported] == cold.tokens(PROMPTS, SAMPLED)
    assert [answer.cached_tokens for answer in reported] == [0, 0]


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "budget"), [(1, 16, 1), (2, 4, 2), (256, 4096, 2048)], ids=str
)
def test_it_keeps_within_an_engines_limits_and_to_the_scratch_block(
    max_num_seqs: int, max_model_len: int, budget: int
) -> None:
    config = EngineConfig(
        num_blocks=300,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    seated: set[int] = set()
    for plan in warmup_plans(config, vocab_size=100):
        assert plan.rows.max() < max_num_seqs
        if isinstance(plan, StepPlan):
            seated = seated - set(plan.released) | {each.row for each in plan.admitted}
            assert (plan.num_tokens, plan.block_ids.size) <= (budget, 0)
            assert (plan.starts + plan.counts).max() <= max_model_len
        else:
            assert plan.positions.max() <= max_model_len
    assert seated == set()


class PacedExecutor:
    """An executor whose clock moves 10 ms a step and 1 ms a token."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = 0

    def submit(self, plan: StepPlan) -> int:
        self.seconds += 0.010 + 0.001 * plan.num_tokens
        self.num_tokens += plan.num_tokens
        return 0

    def draw(self, plan: DrawPlan) -> int:
        return 0

    def retire(self, handle: int) -> None:
        pass


def test_a_start_computes_few_tokens_and_expects_the_pace_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = PacedExecutor()
    monkeypatch.setattr(plans.time, "perf_counter", lambda: executor.seconds)
    config = EngineConfig(
        num_blocks=300, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=2400
    )
    seconds = plans.seconds_of_a_step(cast(Executor, executor), config, vocab_size=100)
    assert seconds == pytest.approx(2400 / 24 * (0.010 + 0.024))
    assert executor.num_tokens == 24 + 1 + 24 + 6 + 6 + 1
