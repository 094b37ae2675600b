"""Configs of StarCoder 2."""

from __future__ import annotations

from ...weights.model_config import ModelConfig, activation_of
from ...weights.rope.config import positive_of
from .fields import Config, kinds_of_layers, windows


def read_starcoder2(config: Config) -> ModelConfig:
    bias = bool(config.get("use_bias", True))
    kinds = kinds_of_layers(config, lambda i: True)
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config},
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=positive_of(config, "norm_epsilon", 1e-5),
        activation=activation_of(config, default="gelu_pytorch_tanh"),
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        **windows(config, kinds),
    )
