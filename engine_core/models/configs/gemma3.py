"""Configs of Gemma 3, text and the text part of models that read images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import ConfigError, require
from ...weights.model_config import ModelConfig, size_of
from ...weights.rope.config import mapping_of, positive_of, scaling_of
from .fields import FULL, SLIDING, Config, every, kinds_of_layers, windows

ACTIVATION = "gelu_pytorch_tanh"
PATTERN = 6
"""Default distance between layers that see all keys; the others see a window."""
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
"""Bases of rotary positions in layers that see all keys and in layers with a window, where a config
does not say."""
UNSERVED = (
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_bias",
)
"""Switches of other models of this architecture."""


def read_gemma3(config: Config) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    if (activation := config.get("hidden_activation", ACTIVATION)) != ACTIVATION:
        raise ConfigError("hidden_activation", activation, ACTIVATION)
    for name in UNSERVED:
        require(not config.get(name), name, config.get(name), "none")
    rope, local = rope_of_kinds(config)
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", PATTERN))
    flat = {
        key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")
    }
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, "head_dim": 256, **flat, "rope_parameters": rope},
        activation="gelu_tanh",
        qk_norm=True,
        norm_offset=1.0,
        attention_scale=positive_of(config, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=size_of(config, "hidden_size") ** 0.5,
        local_rope_theta=positive_of(local, "rope_theta", LOCAL_THETA),
        fits_float16=False,
        **windows(config, kinds, default=4096),
    )


def rope_of_kinds(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parameters of rotary positions in layers that see all keys, and in the others; old configs
    have them flat."""
    given = mapping_of(config, "rope_parameters")
    scaling = mapping_of(config, "rope_scaling")
    require(
        given.keys() <= {FULL, SLIDING},
        "rope_parameters",
        given,
        f"parameters of {FULL} and {SLIDING}",
    )
    nested = mapping_of(given, FULL)
    if nested and scaling and nested != scaling:
        raise ConfigError(
            "rope_scaling", scaling, f"none beside rope_parameters.{FULL}, or the same"
        )
    rope = {"rope_theta": positive_of(config, "rope_theta", GLOBAL_THETA), **(nested or scaling)}
    local_theta = positive_of(config, "rope_local_base_freq", LOCAL_THETA)
    local = {"rope_theta": local_theta, **mapping_of(given, SLIDING)}
    if scaling_of(local, config) is not None:
        raise ConfigError(f"rope_parameters.{SLIDING}.rope_type", local["rope_type"], "default")
    return rope, local
