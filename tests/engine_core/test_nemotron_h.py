"""Nemotron-H and Nemotron 3, whose published layers are one mixer, MLP or mixture of experts each:
which of our layers has them, and configs that are not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models.configs.states.nemotron_h import read_nemotron_h
from headwater.engine_core.models.states.nemotron_h import NemotronH, located
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.small_models import NEMOTRON, convert, random_checkpoint

CONFIG: dict[str, Any] = NEMOTRON | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M*EM",
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}


def test_a_layer_is_a_mixer_with_the_mlp_or_experts_that_follow_it() -> None:
    model = read_nemotron_h(CONFIG)
    assert model.num_layers == 4
    assert model.states is not None
    assert model.states.is_state == (True, True, False, True)
    assert model.has_inner == (True, False, True, False)
    assert model.experts is not None
    assert model.experts.is_sparse == (False, False, True, False)

    layout = NemotronH.layout(model)

    assert [located(i, "norm.weight", layout) for i in range(6)] == [
        (0, "norm.weight"),
        (0, "post.norm.weight"),
        (1, "norm.weight"),
        (2, "norm.weight"),
        (2, "post.norm.weight"),
        (3, "norm.weight"),
    ]


def test_kinds_of_layers_are_read_by_letters_and_by_names_old_and_new() -> None:
    names = ["mamba", "mlp", "mamba", "attention", "moe", "linear_attention"]
    assert read_nemotron_h(CONFIG | {"layers_block_type": names}) == read_nemotron_h(CONFIG)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("hybrid_override_pattern", "M-X*", "letters of M"),
        ("hybrid_override_pattern", "-M*", "lists in which an mlp or moe follows"),
        ("hybrid_override_pattern", "M-E*", "lists in which an mlp or moe follows"),
        ("layers_block_type", ["mamba", "window"], "a list of linear_attention"),
        ("moe_latent_size", 64, "None"),
        ("mlp_hidden_act", "silu", "relu2"),
        ("use_bias", True, "false"),
        ("residual_in_fp32", True, "false"),
        ("sliding_window", 512, "None"),
        ("n_shared_experts", 2, "1"),
        ("time_step_limit", [0.01, 0.1], r"\[0, infinity\]"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*; allowed: {allowed}"):
        read_nemotron_h(CONFIG | {field: value})


def test_a_gpu_refuses_experts_without_a_gate_by_name(tmp_path: Path) -> None:
    random_checkpoint("nemotron3", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    options = ExecutorOptions(model_folder=folder, block_size=16)
    assert not checked(options, "cpu", cpu.capabilities).model.is_gated
    sentence = "experts without a gate is True; allowed: experts with a gate on the platform cuda"
    with pytest.raises(ConfigError, match=sentence):
        checked(options, "cuda", cuda.capabilities)
