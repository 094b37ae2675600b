"""Configs of SmolLM3, of which every fourth layer has no rotary positions."""

from __future__ import annotations

from ...config import ConfigError
from ...weights.model_config import ModelConfig, size_of
from .fields import Config, every, kinds_of_layers, windows


def read_smollm3(config: Config) -> ModelConfig:
    is_rotary = rotary_layers(config)
    bias = bool(config.get("attention_bias", False))
    kinds = kinds_of_layers(config, lambda i: not is_rotary[i])
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config},
        default_theta=2_000_000.0,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        is_rotary=is_rotary,
        **(windows(config, kinds) if config.get("use_sliding_window") else {}),
    )


def rotary_layers(config: Config) -> tuple[bool, ...]:
    """Whether positions rotate queries and keys of each layer: all but each fourth, unless a config
    says otherwise. Raises `ConfigError`."""
    num_layers = size_of(config, "num_hidden_layers")
    given = config.get("no_rope_layers")
    if not given:
        rotates = every(config, "no_rope_layer_interval", 4)
        return tuple(rotates(i) for i in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers or not {*given} <= {0, 1}:
        allowed = f"{num_layers} of 1, for layers that rotate, and 0"
        raise ConfigError("no_rope_layers", given, allowed)
    return tuple(bool(each) for each in given)
