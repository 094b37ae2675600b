"""Reads `config.json` of a model that transformers' modelling code computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import require
from ...weights.formats.quantization import read_quantization
from ...weights.model_config import ModelConfig
from .library import class_name, knows, transformers_of
from .probe import facts_of


def read_foreign(hf_config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    transformers_of("architectures", architecture)
    name = class_name(hf_config)
    require(name, "model_type", hf_config.get("model_type"), "decoders that transformers knows")
    require(knows(hf_config, architecture), "architectures", architecture, name)
    facts = facts_of(hf_config)
    windows = sorted(set(facts.windows) - {0})
    allowed = "one window for all layers that have one"
    require(len(windows) <= 1, "sliding_window", windows, allowed)
    return ModelConfig(
        architecture=name,
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.inner_size,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=facts.max_position_embeddings,
        rms_norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=None,
        tie_word_embeddings=facts.is_tied,
        attention_scale=facts.scale,
        attention_softcap=facts.softcap,
        sliding_window=windows[0] if windows else 0,
        is_windowed=tuple(map(bool, facts.windows)) if windows else (),
        quantization=read_quantization(hf_config),
        foreign=dict(hf_config),
    )
