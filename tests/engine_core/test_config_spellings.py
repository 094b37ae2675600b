"""Spellings of a `config.json` that other tools write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.weights.model_config import ACTIVATIONS
from headwater.kernels.norm.activation import ACTIVATIONS as FUNCTIONS
from tests.engine_core.small_models import SHAPE

LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_function_that_transformers_calls_so(name: str) -> None:
    x = torch.linspace(-6, 6, 997, dtype=torch.float64)
    config = registry.config_of(LLAMA | {"hidden_act": name})
    ours = FUNCTIONS[config.activation](x)
    assert torch.allclose(ours, ACT2FN[name](x), atol=1e-6)


@pytest.mark.parametrize(
    ("named", "architecture"),
    [
        ({"architectures": ["Qwen3Model"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["MistralModel"]}, "MistralForCausalLM"),
        ({"architectures": ["LLaMAForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["YiForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["AquilaModel"]}, "LlamaForCausalLM"),
        ({"architectures": ["XverseForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"architectures": [], "model_type": "mistral"}, "MistralForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_known_by_other_names(named: dict[str, Any], architecture: str) -> None:
    assert registry.config_of(SHAPE | named).architecture == architecture


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"attention_bias": "false"}, "attention_bias is 'false'; allowed: true or false, not as"),
        ({"tie_word_embeddings": "True"}, "tie_word_embeddings is 'True'; allowed: true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; allowed: a positive number"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; allowed: a positive number"),
        ({"hidden_size": "64"}, "hidden_size is '64'; allowed: a whole number, 1…262144"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; allowed: silu, swish, gelu"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_field(
    fields: dict[str, Any], refused: str
) -> None:
    """transformers refuses numbers and switches as text too."""
    with pytest.raises(ConfigError, match=refused):
        registry.config_of(LLAMA | fields)
