"""Configs of GLM-4 (dense)."""

from __future__ import annotations

from ...weights.model_config import ModelConfig
from .fields import Config


def read_glm4(config: Config) -> ModelConfig:
    return ModelConfig.from_hf(
        {"head_dim": 128, "partial_rotary_factor": 0.5, **config},
        rotates_parts=True,
        is_interleaved=True,
        qkv_bias=bool(config.get("attention_bias", True)),
    )
