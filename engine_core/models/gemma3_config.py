"""Sizes of a Gemma 3, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import ConfigError, require
from ..weights.formats.quantization import read_quantization
from ..weights.model_config import (
    NORM_EPS,
    ModelConfig,
    check_sizes,
    checked_rope,
    mapping_of,
    positive_of,
)

ACTIVATION = "gelu_pytorch_tanh"
SLIDING = "sliding_attention"
FULL = "full_attention"
MAX_WINDOW = 1 << 28
PATTERN = 6
"""By default every so many-th layer sees all keys, the others a window of them."""
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0
"""Bases of rotary positions in layers that see all keys and in layers with a window, where a config
does not say."""
UNSERVED = (
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_bias",
)
"""Switches of other models of this architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """The base of `rope_theta` and its scaling are those of layers that see all keys."""

    attention_scale: float
    local_rope_theta: float
    """Rotary base of layers with a window; their positions are not scaled."""
    is_windowed: tuple[bool, ...]
    """By layer."""
    fits_float16: bool = False

    def of_layers(self, first: int, stop: int) -> Gemma3Config:
        return replace(self, num_layers=stop - first, is_windowed=self.is_windowed[first:stop])


def read_config(config: Mapping[str, Any]) -> Gemma3Config:
    """Raises `ConfigError` naming what is not served."""
    quantization = read_quantization(config)
    check_sizes(config)
    if (activation := config.get("hidden_activation", ACTIVATION)) != ACTIVATION:
        raise ConfigError("hidden_activation", activation, ACTIVATION)
    for name in UNSERVED:
        require(not config.get(name), name, config.get(name), "none")
    rope, local = _rope(config)
    return Gemma3Config(
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or 256,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=positive_of(config, "rms_norm_eps", NORM_EPS),
        rope_theta=positive_of(rope, "rope_theta", GLOBAL_THETA),
        rope_scaling=checked_rope(
            {key: value for key, value in rope.items() if key != "rope_theta"}
        ),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        qk_norm=True,
        sliding_window=_whole(config, "sliding_window", 4096),
        attention_scale=positive_of(config, "query_pre_attn_scalar", 256) ** -0.5,
        local_rope_theta=positive_of(local, "rope_theta", LOCAL_THETA),
        is_windowed=_is_windowed(config),
        quantization=quantization,
    )


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Parameters of rotary positions in layers that see all keys, and in the others; old configs
    have them flat."""
    given = mapping_of(config, "rope_parameters")
    scaling = mapping_of(config, "rope_scaling")
    require(
        given.keys() <= {FULL, SLIDING},
        "rope_parameters",
        given,
        f"parameters of {FULL} and {SLIDING}",
    )
    nested = mapping_of(given, FULL)
    if nested and scaling and nested != scaling:
        raise ConfigError(
            "rope_scaling", scaling, f"none beside rope_parameters.{FULL}, or the same"
        )
    rope = {"rope_theta": positive_of(config, "rope_theta", GLOBAL_THETA), **(nested or scaling)}
    local_theta = positive_of(config, "rope_local_base_freq", LOCAL_THETA)
    local = {"rope_theta": local_theta, **mapping_of(given, SLIDING)}
    if checked_rope(local) is not None:
        raise ConfigError(f"rope_parameters.{SLIDING}.rope_type", local["rope_type"], "default")
    return rope, local


def _is_windowed(config: Mapping[str, Any]) -> tuple[bool, ...]:
    num_layers = config["num_hidden_layers"]
    if (types := config.get("layer_types")) is None:
        pattern = _whole(config, "sliding_window_pattern", PATTERN)
        return tuple((i + 1) % pattern != 0 for i in range(num_layers))
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in (SLIDING, FULL) for kind in types)
    ):
        raise ConfigError("layer_types", types, f"{num_layers} of {SLIDING} and {FULL}")
    return tuple(kind == SLIDING for kind in types)


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not (isinstance(value, int) and 1 <= value <= MAX_WINDOW):
        raise ConfigError(name, value, f"a whole number, 1…{MAX_WINDOW}")
    return value
