"""Steps that a CPU replays: tokens and log probabilities are those of steps whose kernels Python
calls one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.executors.device import replayed_steps
from headwater.engine_core.executors.device.replayed_steps import ReplayedSteps
from headwater.engine_core.models import conversion
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.cpu.compiler import replay
from headwater.kernels.cpu.compiler.replay import Replay
from tests.engine_core.oracle_speculator import SAMPLINGS, OracleSpeculator, answers_of_a_new_engine
from tests.engine_core.small_models import Answer, SmallEngine, convert, random_checkpoint
from tests.engine_core.test_block_weights import write as write_blocks
from tests.long_values import long_but

FAMILIES = long_but(
    (
        "smollm2",
        "llama3 with scaled rope",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma3 whose last layer has a window",
    ),
    "qwen2",
    "gemma3 whose last layer has a window",
)
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9], list(range(100, 131)), [8, 7, 6, 5]]
KINDS = ("greedy", "seeded", "filtered", "penalties", "log probabilities")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Replays, one each time that one computes."""
    made: list[Replay] = []
    compute = Replay.__call__

    def counted(self: Replay) -> torch.Tensor:
        made.append(self)
        return compute(self)

    monkeypatch.setattr(Replay, "__call__", counted)
    return made


def answers(
    folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> list[Answer]:
    """Answers of different lengths, so rows leave one by one."""
    samplings = [
        SamplingParams(max_tokens=12 + 3 * i, **SAMPLINGS[KINDS[i % len(KINDS)]])
        for i in range(len(prompts))
    ]
    engine = SmallEngine(folder, **options)
    try:
        return engine.answer(prompts, *samplings)
    finally:
        engine.close()


def plain(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *prompts: Sequence[int], **options: Any
) -> list[Answer]:
    """Answers of an engine that replays nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(replayed_steps, "MAX_TOKENS", 0)
        return answers(folder, prompts or PROMPTS, **options)


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blocks(tmp_path_factory.mktemp("q4"), "Q4_1", "bfloat16")


@pytest.mark.parametrize("num_threads", long_but((1, 2), 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_answers_as_it_does_without_replays(
    family: str,
    num_threads: int,
    tmp_path: Path,
    runs: list[Replay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of each way of sampling, of prompts on both sides of a block's and a window's end."""
    random_checkpoint(family, tmp_path / "hf")
    (tmp_path / "ours").mkdir()
    conversion.convert(
        tmp_path / "hf",
        tmp_path / "ours",
        dtype="bfloat16",
        quantization="int8",
        progress=lambda done, total: None,
    )
    expected = plain(monkeypatch, tmp_path / "ours", num_threads=num_threads)
    assert not runs
    assert answers(tmp_path / "ours", num_threads=num_threads) == expected
    # Five numbers of rows, of which the first steps are plain.
    assert len(runs) > 10
    assert len(set(runs)) == len(PROMPTS)


@pytest.mark.parametrize("kind", long_but(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), "Q5_1"))
@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "float32"))
def test_each_format_answers_as_it_does_without_replays(
    kind: str, dtype: str, tmp_path: Path, runs: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_blocks(tmp_path, kind, dtype)
    assert answers(folder) == plain(monkeypatch, folder)
    assert len(runs) > 10


def test_crowded_rows_answer_as_each_does_alone(q4: Path, runs: list[Replay]) -> None:
    """Preempted requests come back to other rows and blocks."""
    prompts = [[5 + i, 6, 7, *range(3, 3 + 4 * i)] for i in range(12)]
    crowded = answers(
        q4, prompts, num_blocks=24, max_model_len=192, max_num_seqs=8, max_num_batched_tokens=48
    )
    assert len(runs) > 10
    alone = SmallEngine(q4)
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=12 + 3 * i, **SAMPLINGS[KINDS[i % len(KINDS)]])
        (answer,) = alone.answer([prompt], sampling)
        assert answer.token_ids == crowded[i].token_ids
        assert answer.logprobs == crowded[i].logprobs
    alone.close()


@pytest.fixture
def drafting(q4: Path) -> Iterator[SmallEngine]:
    engine = SmallEngine(q4, max_draft_tokens=5)
    yield engine
    engine.close()


def test_steps_that_verify_drafts_are_replayed_too(
    drafting: SmallEngine, runs: list[Replay]
) -> None:
    """Drafts of five tokens: a step of one row then has one to six tokens."""
    samplings = [SamplingParams(max_tokens=48, **SAMPLINGS["seeded"])]
    expected, _ = answers_of_a_new_engine(drafting, PROMPTS[:1], samplings)
    for wrong in (0.0, 0.4):
        runs.clear()
        oracle = OracleSpeculator(expected, wrong).beside(drafting.config)
        found, load = answers_of_a_new_engine(drafting, PROMPTS[:1], samplings, oracle)
        assert found == expected
        assert load.num_accepted_tokens > 0
        assert runs


def test_recorded_steps_are_bounded_and_the_last_used_ones_are_kept(
    q4: Path, runs: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(monkeypatch, q4)
    monkeypatch.setattr(replayed_steps, "MAX_STEPS", 2)
    engine = SmallEngine(q4)
    steps = engine.executor._layers._forward
    assert isinstance(steps, ReplayedSteps)
    samplings = [
        SamplingParams(max_tokens=12 + 3 * i, **SAMPLINGS[KINDS[i]]) for i in range(len(PROMPTS))
    ]
    assert engine.answer(PROMPTS, *samplings) == expected
    assert steps.num_kept == 2
    assert len(set(runs)) == len(PROMPTS)
    engine.close()


def test_a_model_that_torch_computes_is_never_recorded(tmp_path: Path, runs: list[Replay]) -> None:
    """Its products are the library's."""
    random_checkpoint("qwen3", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    steps = engine.executor._layers._forward
    engine.answer(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8))
    assert not runs
    assert not steps.num_kept
    engine.close()


def test_a_fault_of_a_replay_changes_the_answers(q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparisons above have to catch: tensors that share memory while both are needed."""
    expected = plain(monkeypatch, q4)
    monkeypatch.setattr(replay, "_first_gap", lambda live, size: 0)
    found = None
    # Logits that are no numbers show as well.
    with contextlib.suppress(ValueError):
        found = answers(q4)
    assert found != expected
