"""Models with layers of Mamba-2 on a CPU: an answer has the bits of a whole prompt, however the
sequence came in, and configs that are not served are refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models.configs.states.granite_hybrid import read_granite_hybrid
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    GRANITE4,
    Answer,
    SmallEngine,
    convert,
    random_checkpoint,
)
from tests.engine_core.test_delta_nets import PROMPTS, SCORED, exact
from tests.long_values import long_but

CONFIG: dict[str, Any] = GRANITE4 | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mamba")
    random_checkpoint("granite4-hybrid", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Answers to each prompt, which is computed by itself: nothing of it is cached."""
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        return [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", long_but([1, 7, 15, 16, 17, 33]))
def test_chunks_and_company_change_no_bit(chunk: int, folder: Path, alone: list[Answer]) -> None:
    with closing(SmallEngine(folder, max_model_len=256, long_prefill_chunk=chunk)) as engine:
        assert exact(engine.answer(PROMPTS, SCORED)) == exact(alone)


def test_drafts_that_cross_borders_and_are_rolled_back_change_no_bit(
    folder: Path, alone: list[Answer]
) -> None:
    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(alone, 0.4, max_drafts=9).beside(config)

    with closing(
        SmallEngine(folder, max_model_len=256, max_draft_tokens=9, speculate=oracle)
    ) as engine:
        found = engine.answer(PROMPTS, SCORED)
        load = engine.engine.load()
        assert 0 < load.num_accepted_tokens < load.num_draft_tokens
    assert exact(found) == exact(alone)


def test_sizes_follow_from_the_hidden_size_and_layers_without_experts_have_the_shared_mlp() -> None:
    model = read_granite_hybrid(CONFIG | {"mamba_d_head": "auto"})
    assert model.mamba is not None
    assert model.mamba.head_dim == 2 * 64 // 4
    assert model.states is not None
    assert model.states.is_state == (True, False, True, True)
    assert model.experts is not None
    assert model.experts.shared_size == 96
    dense = read_granite_hybrid(CONFIG | {"num_local_experts": 0})
    assert dense.experts is None
    assert dense.intermediate_size == 96


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("mamba_n_groups", 3, r"divisors of mamba_n_heads \(4\)"),
        ("mamba_conv_bias", False, "true"),
        ("mamba_proj_bias", True, "false"),
        ("mamba_d_state", 24, "16 or 32 or 64 or 128 or 256"),
        ("mamba_d_head", "64", "16 or 32 or 64 or 80 or 128 or 256"),
        ("mamba_d_conv", 1, "a whole number, 2…16"),
        ("mamba_n_heads", 0, "a whole number, 1…"),
        ("position_embedding_type", "alibi", "rope or nope"),
        ("layer_types", ["mamba", "window", "mamba", "mamba"], "4 of mamba and attention"),
        ("layer_types", ["mamba"] * 4, "some state layers and some layers with keys and values"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*; allowed: {allowed}"):
        read_granite_hybrid(CONFIG | {field: value})


def test_a_platform_without_layers_of_mamba_refuses_them_by_name(folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, block_size=16)
    for device in (cpu, cuda):
        assert checked(options, device.name, device.capabilities).model.mamba is not None
    sentence = "layers of Mamba-2 is True; allowed: no layers of Mamba-2 on the platform toy"
    with pytest.raises(ConfigError, match=sentence):
        checked(options, "toy", replace(cuda.capabilities, mamba=False))
