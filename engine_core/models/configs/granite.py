"""Configs of Granite 3 and 4 (dense), with four multipliers."""

from __future__ import annotations

from ...weights.model_config import ModelConfig
from ...weights.rope.config import positive_of
from .fields import Config


def read_granite(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return ModelConfig.from_hf(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        attention_scale=positive_of(config, "attention_multiplier", 1.0),
        embedding_scale=positive_of(config, "embedding_multiplier", 1.0),
        residual_scale=positive_of(config, "residual_multiplier", 1.0),
        logit_scale=1 / positive_of(config, "logits_scaling", 1.0),
    )
