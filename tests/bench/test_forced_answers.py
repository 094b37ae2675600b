from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.bench.forced_answers import (
    FREE,
    ForcedAnswers,
    ForcedDeviceSampler,
    ForcedSampler,
    ForcedTokens,
)
from headwater.bench.replays.replay import Exchange
from headwater.bench.speculated_run import FIRST_SEED, run_exchanges
from headwater.bench.workloads import TINY
from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.executor import AdmittedRow, Executor
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.exit.device_sampler import DeviceSampler
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.sampling.sampler import Sampler
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator

RNG = np.random.default_rng(8)
MAX_DRAFTS = 5
REPEATED = RNG.integers(3, 512, 12).tolist()
EXCHANGES = [
    Exchange(
        name="quotes its prompt",
        prompt_ids=REPEATED * 2,
        answer_ids=[*REPEATED, 7, *REPEATED, 9] * 2,
    ),
    Exchange(name="new", prompt_ids=[5], answer_ids=RNG.integers(3, 512, 40).tolist()),
    Exchange(
        name="quotes another",
        prompt_ids=[6, *REPEATED[:3]],
        answer_ids=[*REPEATED[3:], 7, *REPEATED, 9],
    ),
    Exchange(name="one token", prompt_ids=REPEATED, answer_ids=[400]),
]
FORCED = ForcedAnswers(longest=64)
SMALL = TINY | {"vocab_size": 512, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Executor, EngineConfig]]:
    folder = tmp_path_factory.mktemp("forced")
    (folder / "config.json").write_text(json.dumps(SMALL))
    options = ExecutorOptions(
        model_folder=folder,
        load_format="dummy",
        num_threads=1,
        max_num_seqs=8,
        max_draft_tokens=MAX_DRAFTS,
    )
    with FORCED.installed():
        executor, config, _ = build_executor(options, lambda phase, done, total: None)
    yield executor, config
    executor.close()


def eager(config: EngineConfig) -> AdaptiveSpeculator:
    """One to which a step of many tokens costs what a step of one does."""
    costs = StepCosts.measured([1, 64], [1.0, 1.0], 0.0)
    drafters = (
        NGramProposer(config.max_num_seqs, config.max_model_len, MAX_DRAFTS),
        SuffixProposer(8, MAX_DRAFTS),
    )
    return AdaptiveSpeculator(drafters, costs, num_rows=8, max_drafts=MAX_DRAFTS, vocab_size=512)


@pytest.mark.parametrize("rows", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("speculates", [False, True], ids=["off", "on"])
def test_an_engine_says_what_is_forced(
    built: tuple[Executor, EngineConfig], rows: int, speculates: bool
) -> None:
    executor, config = built
    FORCED.expect({FIRST_SEED + i: each.answer_ids for i, each in enumerate(EXCHANGES)})
    speculator = eager(config) if speculates else None
    run = run_exchanges(executor, config, speculator, EXCHANGES, rows=rows, temperature=0.6)
    assert run.token_ids == [each.answer_ids for each in EXCHANGES]
    assert (run.num_accepted > 10) == speculates
    assert run.num_drafted >= run.num_accepted
    if not speculates:
        assert run.tokens_per_step == 1.0
    else:
        assert run.tokens_per_step > 1.0


def test_requests_without_a_forced_answer_get_the_models(
    built: tuple[Executor, EngineConfig], tmp_path: Path
) -> None:
    executor, config = built
    FORCED.expect({FIRST_SEED + 1: EXCHANGES[1].answer_ids})
    run = run_exchanges(executor, config, None, EXCHANGES, rows=4, temperature=0.0)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    options = ExecutorOptions(
        model_folder=tmp_path, load_format="dummy", num_threads=1, max_num_seqs=8
    )
    plain, config, _ = build_executor(options, lambda phase, done, total: None)
    free = run_exchanges(plain, config, None, EXCHANGES, rows=4, temperature=0.0)
    plain.close()
    assert run.token_ids[1] == EXCHANGES[1].answer_ids
    assert free.token_ids[1] != EXCHANGES[1].answer_ids
    assert [run.token_ids[i] for i in (0, 2, 3)] == [free.token_ids[i] for i in (0, 2, 3)]


def test_padding_and_what_lies_behind_an_answer_stay_as_they_are() -> None:
    answers = ForcedAnswers(longest=3)
    answers.expect({4: [40, 41, 42], 5: [50]})
    tokens = ForcedTokens(answers, 2, torch.device("cpu"))
    for row, seed in ((0, 4), (1, 5)):
        sampling = SamplingParams(seed=seed)
        ids = np.ones(1, np.int32)
        tokens.admit(
            AdmittedRow(
                row=row, token_ids=ids, num_prompt_tokens=1, sampling=sampling, choice_index=0
            )
        )
    sampled = torch.full((7,), 9, dtype=torch.int32)
    rows = torch.tensor([0, 0, 0, 1, 1, -1, -1], dtype=torch.int32)
    tokens.replace(sampled, rows, torch.tensor([0, 2, 3, 0, 1, 0, 66], dtype=torch.int32))
    assert sampled.tolist() == [40, 42, 9, 50, 9, 9, 9]
    assert answers.of(6).tolist() == [FREE] * answers.width
    with pytest.raises(AssertionError):
        answers.expect({1: EXCHANGES[1].answer_ids})


@pytest.mark.parametrize(
    ("forced", "ours"), [(ForcedSampler, Sampler), (ForcedDeviceSampler, DeviceSampler)]
)
def test_a_forced_sampler_is_built_with_all_that_its_base_is_built_with(
    forced: type, ours: type
) -> None:
    """An executor builds either; that of a GPU is built on GPUs alone."""
    own, *after = inspect.signature(forced).parameters.values()

    assert own.name == "answers"
    theirs = inspect.signature(ours).parameters.values()
    assert [(each.name, each.default) for each in after] == [
        (each.name, each.default) for each in theirs
    ]
