"""Models with short convolutions on a CPU: an answer has the bits of a whole prompt, however the
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
from headwater.engine_core.models.configs.states.lfm2 import read_lfm2
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    SHAPE,
    Answer,
    SmallEngine,
    convert,
    random_checkpoint,
)
from tests.engine_core.test_delta_nets import PROMPTS, SCORED, exact
from tests.long_values import long_but

CONFIG: dict[str, Any] = SHAPE | {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("conv")
    random_checkpoint("lfm2", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Answers to each prompt, which is computed by itself: nothing of it is cached."""
    with closing(SmallEngine(folder, max_model_len=256)) as engine:
        return [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", long_but([1, 7, 15, 16, 17, 33], 7))
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


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"intermediate_size": 300, "block_auto_adjust_ff_dim": False}, 300),
        ({"block_ff_dim": 300, "block_multiple_of": 64}, 256),
        ({"intermediate_size": 300, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 64}, 320),
        ({"intermediate_size": 300, "block_ffn_dim_multiplier": None}, 200),
    ],
    ids=str,
)
def test_the_width_of_mlps_is_two_thirds_rounded_up_unless_it_stands(
    given: dict[str, Any], size: int
) -> None:
    whole = {name: value for name, value in CONFIG.items() if name != "block_auto_adjust_ff_dim"}
    assert read_lfm2(whole | given).intermediate_size == size


def test_layers_are_what_layer_types_or_numbers_of_attention_layers_say() -> None:
    states = read_lfm2(CONFIG).states
    assert states is not None
    assert states.is_state == (True, False, True)
    numbered = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    states = read_lfm2(numbered | {"full_attn_idxs": [2]}).states
    assert states is not None
    assert states.is_state == (True, True, False)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("conv_bias", True, "false"),
        ("conv_L_cache", 1, "a whole number, 2…16"),
        ("conv_L_cache", "3", "a whole number, 2…16"),
        ("hidden_size", 72, "multiples of 16"),
        ("layer_types", ["conv"] * 3, "3 of conv and full_attention, at least one of each"),
        ("layer_types", ["conv", "full_attention"], "3 of conv and full_attention"),
        ("block_multiple_of", 0, "a whole number, 1…"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*; allowed: {allowed}"):
        read_lfm2(CONFIG | {"block_auto_adjust_ff_dim": True, field: value})


def test_a_platform_without_short_convolutions_refuses_them_by_name(folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, block_size=16)
    for device in (cpu, cuda):
        assert checked(options, device.name, device.capabilities).model.conv is not None
    sentence = (
        "layers with convolutions is True; allowed: no short convolutions on the platform toy"
    )
    with pytest.raises(ConfigError, match=sentence):
        checked(options, "toy", replace(cuda.capabilities, short_convs=False))
