"""Models with gated delta nets on a CPU: an answer has the bits of a whole prompt, however the
sequence came in, and configs that are not served are refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models.configs.states.qwen3_next import read_qwen3_5, read_qwen3_next
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    SHARED_EXPERTS,
    STATES,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
    receive,
)
from tests.long_values import long_but

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 70)
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in LENGTHS]
NUM_TOKENS = 20
SCORED = greedy(NUM_TOKENS, num_logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("delta")
    random_checkpoint("qwen3.5", path / "hf")
    return convert(path / "hf", path / "ours")


def answers(folder: Path, prompts: list[list[int]], **options: Any) -> list[Answer]:
    with closing(SmallEngine(folder, max_model_len=256, **options)) as engine:
        return engine.answer(prompts, SCORED)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Answers to each prompt, which is computed by itself: nothing of it is cached."""
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        return [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]


def exact(given: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in given]


@pytest.mark.parametrize("chunk", long_but([1, 7, 15, 16, 17, 33]))
def test_chunks_and_company_change_no_bit(chunk: int, folder: Path, alone: list[Answer]) -> None:
    assert exact(answers(folder, PROMPTS, long_prefill_chunk=chunk)) == exact(alone)


def test_what_pages_held_before_changes_no_bit(folder: Path, alone: list[Answer]) -> None:
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        # Bytes of states may be no numbers in the dtype of keys and values.
        memory = engine.executor.kv_caches[0].untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(memory).fill_(0xFF)
        assert exact(engine.answer(PROMPTS, SCORED)) == exact(alone)


@pytest.mark.long
def test_larger_blocks_give_the_tokens_of_small_ones(folder: Path, alone: list[Answer]) -> None:
    found = answers(folder, PROMPTS, block_size=64, num_blocks=200)
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]


@pytest.mark.parametrize("wrong", long_but([0.1, 0.6], 0.6))
def test_drafts_that_cross_borders_and_are_rolled_back_change_no_bit(
    wrong: float, folder: Path, alone: list[Answer]
) -> None:
    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(alone, wrong, max_drafts=9).beside(config)

    with closing(
        SmallEngine(folder, max_model_len=256, max_draft_tokens=9, speculate=oracle)
    ) as engine:
        found = engine.answer(PROMPTS, SCORED)
        load = engine.engine.load()
        assert 0 < load.num_accepted_tokens < load.num_draft_tokens
    assert exact(found) == exact(alone)


def test_an_answer_that_goes_on_at_a_snapshot_has_the_same_bits(
    folder: Path, alone: list[Answer]
) -> None:
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        engine.answer(PROMPTS[-1:], SCORED)
        known = [*PROMPTS[-1], *alone[-1].token_ids[:15]]
        (again,) = engine.answer([known], greedy(5, num_logprobs=1))
    assert again.cached_tokens >= 64
    assert exact([again])[0] == tuple(part[15:] for part in exact(alone)[-1])


@pytest.mark.parametrize("length", long_but([17, 32], 17))
def test_choices_of_a_prompt_are_those_of_requests_apart(length: int, folder: Path) -> None:
    prompt = PROMPTS[LENGTHS.index(length)]
    sampling = SamplingParams(seed=4, max_tokens=NUM_TOKENS, num_logprobs=1)
    one = NewRequest(key=0, prompt_ids=prompt, output_ids=[], sampling=sampling, forks=True)

    def run(groups: list[list[int]]) -> list[Answer]:
        given = {key: Answer([], [], []) for key in range(3)}
        for keys in groups:
            with closing(SmallEngine(folder, max_model_len=256)) as engine:
                for key in keys:
                    engine.engine.add(replace(one, key=key, choice_index=key))
                while engine.engine.has_work():
                    if (output := engine.engine.step()) is not None:
                        receive(output, given)
        return [*given.values()]

    together = run([[0, 1, 2]])
    assert together[1].cached_tokens == length - 1
    assert exact(together) == exact(run([[0], [1], [2]]))


CONFIG = STATES | {"architectures": ["Qwen3NextForCausalLM"]}


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("linear_conv_kernel_dim", 3, "linear_conv_kernel_dim is 3; allowed: 4"),
        ("linear_num_value_heads", 3, "linear_num_value_heads is 3; allowed: multiples of"),
        ("linear_key_head_dim", 48, "linear_key_head_dim is 48; allowed: "),
        ("attention_bias", True, "attention_bias is True; allowed: false"),
        ("layer_types", ["linear_attention"] * 4, "layer_types is .* at least one of each"),
        ("layer_types", ["mamba"] * 4, "layer_types is .* at least one of each"),
    ],
)
def test_configs_that_are_not_served_are_refused_by_the_field(
    field: str, value: object, refused: str
) -> None:
    read_qwen3_5(CONFIG)
    with pytest.raises(ConfigError, match=refused):
        read_qwen3_5(CONFIG | {field: value})


def test_blocks_that_a_platform_has_no_kernel_for_are_refused(folder: Path) -> None:
    flags = replace(cpu.capabilities, state_block_sizes=(16, 64))
    options = ExecutorOptions(model_folder=folder, block_size=32)
    checked(options, "toy", cpu.capabilities)
    with pytest.raises(ConfigError, match="block_size is 32; allowed: 16 or 64 with states on the"):
        checked(options, "toy", flags)


def test_layers_attend_in_intervals_where_a_config_does_not_name_them() -> None:
    unnamed = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    config = read_qwen3_next({**unnamed, **SHARED_EXPERTS, "num_hidden_layers": 8})
    assert [config.has_state(i) for i in range(8)] == 2 * [True, True, True, False]
