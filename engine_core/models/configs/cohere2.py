"""Configs of Cohere 2 (Command R7B, Command A)."""

from __future__ import annotations

from ...config import require
from ...weights.model_config import ModelConfig
from ...weights.rope.config import positive_of
from .fields import Config, every, kinds_of_layers, windows


def read_cohere2(config: Config) -> ModelConfig:
    """Config of Cohere 2, whose layers without a window have no rotary positions."""
    require(not config.get("use_qk_norm"), "use_qk_norm", config.get("use_qk_norm"), "none")
    bias = bool(config.get("attention_bias", False))
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", 4))
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config},
        has_layer_norms=True,
        rms_norm_eps=positive_of(config, "layer_norm_eps", 1e-5),
        is_interleaved=True,
        is_rotary=kinds,
        qkv_bias=bias,
        o_bias=bias,
        logit_scale=positive_of(config, "logit_scale", 0.0625),
        **windows(config, kinds, default=4096),
    )
