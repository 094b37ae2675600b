"""Configs of Gemma 1 and 2."""

from __future__ import annotations

from typing import Any

from ...config import require
from ...weights.model_config import ModelConfig, size_of
from ...weights.rope.config import positive_of
from .fields import Config, every, kinds_of_layers, windows

ACTIVATIONS = (None, "gelu", "gelu_pytorch_tanh")
"""`gelu` in old files of Gemma 1 is the approximation by tanh."""


def read_gemma(config: Config) -> ModelConfig:
    given = config.get("hidden_activation") or config.get("hidden_act")
    require(given in ACTIVATIONS, "hidden_act", given, "gelu_pytorch_tanh")
    return _read(config)


def read_gemma2(config: Config) -> ModelConfig:
    given = config.get("hidden_activation")
    require(given in (None, ACTIVATIONS[-1]), "hidden_activation", given, ACTIVATIONS[-1])
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", 2))
    return _read(
        config,
        attention_scale=positive_of(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(config, "final_logit_softcapping", 30.0),
        **windows(config, kinds, default=4096),
    )


def _read(config: Config, **traits: Any) -> ModelConfig:
    for name in ("use_bidirectional_attention", "attention_bias"):
        require(not config.get(name), name, config.get(name), "none")
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, "head_dim": 256, **config},
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=size_of(config, "hidden_size") ** 0.5,
        fits_float16=False,
        **traits,
    )


def _cap(config: Config, name: str, default: float) -> float:
    """0: there is none."""
    return 0.0 if config.get(name, default) is None else positive_of(config, name, default)
