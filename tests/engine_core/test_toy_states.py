"""A model with state layers on a CPU: its answers have the bits of a whole prompt, however the
sequence came in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.build.simulated import build_executor, simulated_model
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.executors.simulated.states import PAGES_OF_UNIT
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from tests.engine_core import toy_states
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import SHAPE, Answer, SmallEngine, convert, greedy
from tests.engine_core.toy_states import ToyStates
from tests.long_values import long_but

CONFIG = SHAPE | {"architectures": [toy_states.NAME], "rms_norm_eps": 1e-6}
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 70)
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in LENGTHS]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random checkpoint."""
    tmp_path = tmp_path_factory.mktemp("toy")
    installed = tmp_path / "site" / "toystates-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toystates\nVersion: 1.0\n")
    entry = f"[{registry.ENTRY_POINTS}]\n{toy_states.NAME} = {toy_states.__name__}:ARCHITECTURE\n"
    (installed / "entry_points.txt").write_text(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path / "site")
        source = tmp_path / "hf"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(CONFIG))
        generator = torch.Generator().manual_seed(0)
        theirs = {ours: hf for hf, ours in (ToyStates.names.model | ToyStates.names.layer).items()}
        tensors = {}
        for name, spec in ToyStates.layout(registry.config_of(CONFIG)).items():
            stem = name.split(".")[-1]
            prefix = "" if stem == name else f"model.{name.removesuffix(stem)}"
            values = torch.randn(spec.shape, generator=generator) * 0.3
            tensors[prefix + theirs[stem]] = values + 1 if spec.is_norm else values
        save_file(tensors, source / "model.safetensors")
        yield convert(source, tmp_path / "ours")


def answers(folder: Path, prompts: list[list[int]], **options: int) -> list[Answer]:
    with closing(SmallEngine(folder, max_model_len=256, **options)) as engine:
        return engine.answer(prompts, greedy(NUM_TOKENS, num_logprobs=1))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Answers to each prompt, which is computed in one pass by itself: nothing of it is cached."""
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        sampling = greedy(NUM_TOKENS, num_logprobs=1)
        return [engine.answer([prompt], sampling)[0] for prompt in PROMPTS]


def same(found: list[Answer], expected: list[Answer]) -> bool:
    return [(each.token_ids, each.logprobs) for each in found] == [
        (each.token_ids, each.logprobs) for each in expected
    ]


@pytest.mark.parametrize("chunk", long_but([0, 1, 7, 16, 33]))
def test_chunks_and_company_change_no_bit(chunk: int, folder: Path, alone: list[Answer]) -> None:
    assert same(answers(folder, PROMPTS, long_prefill_chunk=chunk), alone)


def test_preempted_answers_go_on_with_the_same_bits(folder: Path, alone: list[Answer]) -> None:
    with closing(SmallEngine(folder, max_model_len=256, num_blocks=30)) as engine:
        found = engine.answer(PROMPTS, greedy(NUM_TOKENS, num_logprobs=1))
        assert engine.engine.load().num_preemptions > 0
    assert same(found, alone)


def test_an_answer_that_is_continued_at_a_snapshot_has_the_same_bits(
    folder: Path, alone: list[Answer]
) -> None:
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        engine.answer(PROMPTS, greedy(NUM_TOKENS))
        for prompt, whole in zip(PROMPTS, alone, strict=True):
            known = [*prompt, *whole.token_ids[:-2]]
            (again,) = engine.answer([known], greedy(2, num_logprobs=1))
            assert again.token_ids == whole.token_ids[-2:]
            assert again.logprobs == whole.logprobs[-2:]
            assert again.cached_tokens in ((len(known) - 1) // 16 * 16, len(prompt) // 16 * 16)


@pytest.mark.parametrize("wrong", long_but([0.1, 0.6], 0.6))
def test_drafts_that_cross_borders_and_are_rolled_back_change_no_token(
    wrong: float, folder: Path, alone: list[Answer]
) -> None:
    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(alone, wrong, max_drafts=9).beside(config)

    with closing(
        SmallEngine(folder, max_model_len=256, max_draft_tokens=9, speculate=oracle)
    ) as engine:
        found = engine.answer(PROMPTS, greedy(NUM_TOKENS, num_logprobs=1))
        load = engine.engine.load()
        assert 0 < load.num_accepted_tokens < load.num_draft_tokens
    assert same(found, alone)


def test_a_cache_too_small_for_the_states_of_the_longest_sequence_is_refused(folder: Path) -> None:
    allowed = "num_blocks is 28; allowed: at least 29 for max_model_len 256 and states of 3 pages"
    with pytest.raises(ConfigError, match=allowed):
        SmallEngine(folder, max_model_len=256, num_blocks=28)


def test_adapters_beside_states_are_refused_by_name(folder: Path) -> None:
    named = "adapter_memory is 65536; allowed: 0 with a model with 2 state layers"
    with pytest.raises(ConfigError, match=named):
        SmallEngine(folder, max_model_len=256, adapter_memory=65536)


def test_the_simulated_executor_of_such_a_model_keeps_states(folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, executor="simulated", num_blocks=80)
    executor, config, _ = build_executor(options, lambda phase, done, total: None)
    assert config.state_pages == PAGES_OF_UNIT
    engine = Engine(config, executor)
    engine.add(NewRequest(key=0, prompt_ids=list(range(40)), output_ids=[], sampling=greedy(20)))
    found = []
    while engine.has_work():
        output = engine.step()
        found += output.token_ids if output is not None else []
    model = simulated_model(512, config)
    assert found == expected_tokens(model, range(40), greedy(20))
    ranks = replace(options, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed: 1 with"):
        build_executor(ranks, lambda phase, done, total: None)
