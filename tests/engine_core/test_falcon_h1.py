"""Falcon-H1, whose layers have Mamba-2 and attention side by side: what becomes of its
multipliers, and configs that are not served."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models.configs.states.falcon_h1 import read_falcon_h1
from headwater.engine_core.models.states.falcon_h1 import FalconH1
from tests.engine_core.small_models import FALCON_H1

CONFIG: dict[str, Any] = FALCON_H1 | {"architectures": ["FalconH1ForCausalLM"]}


def test_a_published_layer_is_one_of_mamba_and_one_of_attention_with_the_mlp() -> None:
    model = read_falcon_h1(CONFIG)
    assert model.num_layers == 6
    assert model.states is not None
    assert model.states.is_state == (True, False) * 3
    assert model.caching_layers == [1, 3, 5]
    names = FalconH1.layout(model)
    of_layer = [{name.split(".")[2] for name in names if f"layers.{i}." in name} for i in (2, 3)]
    assert {"input_norm", "mamba_parts"} <= of_layer[0]
    assert of_layer[1] == {"qkv", "o", "post_norm", "gate_up", "down"}


def test_the_factor_of_what_attention_reads_multiplies_queries_keys_and_values() -> None:
    model = read_falcon_h1(CONFIG)
    assert model.multipliers is not None
    assert model.attention_scale == pytest.approx(1.25**2 * 0.375 / math.sqrt(16))
    assert model.multipliers.attention_out == pytest.approx(1.25 * 0.8)


def test_multipliers_are_one_where_a_config_names_none() -> None:
    named = {name: value for name, value in CONFIG.items() if "multiplier" not in name}
    multipliers = read_falcon_h1(named).multipliers
    assert multipliers is not None
    assert multipliers.projections == (1.0,) * 5
    assert multipliers.mlp == (1.0, 1.0)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("ssm_multipliers", [1.0], "5 numbers"),
        ("mlp_multipliers", ["1", 2.0], "2 numbers"),
        ("mamba_conv_bias", False, "true"),
        ("projectors_bias", True, "false"),
        ("mamba_d_ssm", 96, "mamba_n_heads · mamba_d_head, 64"),
        ("mamba_rms_norm", True, "false with mamba_rms_norm"),
        ("mamba_n_groups", 3, r"divisors of mamba_n_heads \(4\)"),
        ("time_step_limit", [0.0, 0.1], r"\[0, infinity\]"),
    ],
)
def test_a_config_that_is_not_served_is_refused_by_its_field(
    field: str, value: object, allowed: str
) -> None:
    refused = "mamba_norm_before_gate" if field == "mamba_rms_norm" else field
    with pytest.raises(ConfigError, match=f"{refused} is .*; allowed: {allowed}"):
        read_falcon_h1(CONFIG | {field: value})
