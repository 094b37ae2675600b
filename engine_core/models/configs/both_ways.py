"""Configs of decoders whose tokens see each other both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...config import require
from ...weights.encoders.config import EncoderConfig, dense_of
from ...weights.encoders.sentence_files import KEY
from ...weights.model_config import ModelConfig
from .fields import MAX_WINDOW, Config

FIELDS = {"is_causal": False, "use_bidirectional_attention": True}
"""Fields of a config, with the values that mean bidirectional attention."""


def sees_both_ways(config: Config) -> bool:
    return any(config.get(name) is value for name, value in FIELDS.items())


def size_of_window(given: object) -> int:
    """Raises `ConfigError` for what is no number of keys."""
    is_size = type(given) is int and 1 <= given <= MAX_WINDOW
    require(is_size, "sliding_window", given, f"a whole number, 1…{MAX_WINDOW}")
    return int(str(given))


def read_both_ways(read: Callable[[Config], ModelConfig], config: Config) -> ModelConfig:
    """The config of an encoder that has the layers of a decoder."""
    own = {name: value for name, value in config.items() if name not in FIELDS}
    if config.get("use_bidirectional_attention") and own.get("sliding_window"):
        # Published windows reach half as far to each side.
        own["sliding_window"] = size_of_window(own["sliding_window"]) // 2 + 1
    model = read({**own, "tie_word_embeddings": True})
    _check_attention(model)
    sentence = config.get(KEY)
    longest = (sentence or {}).get("max_length") or model.max_position_embeddings
    return replace(
        model,
        max_position_embeddings=min(longest, model.max_position_embeddings),
        encoder=EncoderConfig(is_decoder=True, dense=dense_of(sentence)),
    )


def _check_attention(model: ModelConfig) -> None:
    """Raises `ConfigError` for what `BothWaysAttention` does not compute."""
    is_partial = model.rotary_dim not in (0, model.head_dim) or model.is_interleaved
    unserved = {
        "attn_logit_softcapping": model.attention_softcap,
        "attention sinks": model.has_sinks,
        "norms over all heads": model.width_norms,
        "rotary_dim": model.rotary_dim if is_partial else 0,
        "query_scale_beta": model.query_scale_beta,
        "num_experts": model.experts is not None,
    }
    for name, value in unserved.items():
        require(not value, name, value, "none where tokens see each other both ways")
