"""Configs of Ministral 3, whose queries grow behind the original length."""

from __future__ import annotations

from ...weights.model_config import ModelConfig
from ...weights.rope.config import mapping_of, positive_of
from .fields import Config, kinds_of_layers, windows


def read_ministral3(config: Config) -> ModelConfig:
    rope = mapping_of(config, "rope_parameters") or mapping_of(config, "rope_scaling")
    beta = rope.get("llama_4_scaling_beta")
    kinds = kinds_of_layers(config, lambda i: True)
    return ModelConfig.from_hf(
        config,
        query_scale_beta=0.0 if not beta else positive_of(rope, "llama_4_scaling_beta"),
        **windows(config, kinds),
    )
