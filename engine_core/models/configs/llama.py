"""Configs of Llama, Mistral, Qwen2 and Qwen3, and of families that differ from Llama in a few
fields."""

from __future__ import annotations

from typing import Any

from ...config import require
from ...weights.model_config import ModelConfig
from .fields import Config, kinds_of_layers, windows


def read_llama(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return ModelConfig.from_hf(
        config,
        qkv_bias=bias,
        # Files of other tools have biases of queries, keys and values alone.
        o_bias=bool(config.get("attention_out_bias", bias)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def read_mistral(config: Config) -> ModelConfig:
    kinds = kinds_of_layers(config, lambda i: True)
    return ModelConfig.from_hf(config, **windows(config, kinds))


def read_qwen2(config: Config) -> ModelConfig:
    return ModelConfig.from_hf(config, qkv_bias=True, **_windows_above(config))


def read_qwen3(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return ModelConfig.from_hf(
        config,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bool(config.get("attention_out_bias", bias)),
        **_windows_above(config),
    )


def read_internlm3(config: Config) -> ModelConfig:
    bias = bool(config.get("bias", config.get("mlp_bias", False)))
    qkv_bias = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    return ModelConfig.from_hf(config, qkv_bias=qkv_bias, o_bias=bias, mlp_bias=bias)


def read_seed_oss(config: Config) -> ModelConfig:
    return ModelConfig.from_hf(
        config,
        qkv_bias=bool(config.get("attention_bias", True)),
        o_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def read_ernie45(config: Config) -> ModelConfig:
    bias = bool(config.get("use_bias", False))
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config},
        default_theta=500_000.0,
        is_interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def read_glm4(config: Config) -> ModelConfig:
    return ModelConfig.from_hf(
        {"head_dim": 128, "partial_rotary_factor": 0.5, **config},
        rotates_parts=True,
        is_interleaved=True,
        qkv_bias=bool(config.get("attention_bias", True)),
    )


def _windows_above(config: Config) -> dict[str, Any]:
    """Windows of layers from `max_window_layers` on, where `use_sliding_window` says so."""
    if not config.get("use_sliding_window", False):
        return {}
    first = config.get("max_window_layers", 28)
    require(type(first) is int and first >= 0, "max_window_layers", first, "a whole number")
    kinds = kinds_of_layers(config, lambda i: i >= first)
    return windows(config, kinds, default=4096)
