"""Configs of OLMo 2 and 3, and of EXAONE 4: norms behind each product, none before."""

from __future__ import annotations

from ...config import require
from ...weights.model_config import ModelConfig
from ...weights.rope.config import mapping_of
from .fields import FULL, SLIDING, Config, every, kinds_of_layers, windows

THETA = 500_000.0


def read_olmo2(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", False))
    return ModelConfig.from_hf(config, width_norms=True, qkv_bias=bias, o_bias=bias)


def read_olmo3(config: Config) -> ModelConfig:
    """Config of OLMo 3, whose layers with a window have rotary positions that are not scaled."""
    bias = bool(config.get("attention_bias", False))
    given = mapping_of(config, "rope_parameters")
    flat = dict(config)
    local = config.get("rope_theta") or THETA
    if given.keys() & {FULL, SLIDING}:
        sliding = mapping_of(given, SLIDING)
        kind = sliding.get("rope_type", "default")
        require(kind == "default", f"rope_parameters.{SLIDING}.rope_type", kind, "default")
        flat["rope_parameters"] = mapping_of(given, FULL)
        local = sliding.get("rope_theta", local)
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", 4))
    return ModelConfig.from_hf(
        flat,
        default_theta=THETA,
        width_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        local_rope_theta=local,
        **windows(config, kinds, default=4096),
    )


def read_exaone4(config: Config) -> ModelConfig:
    """Config of EXAONE 4. Where some layers have a window, the others have no rotary positions."""
    if config.get("sliding_window", 4096) is None:
        return ModelConfig.from_hf(config, qk_norm=True)
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", 4))
    read = windows(config, kinds, default=4096)
    return ModelConfig.from_hf(config, qk_norm=True, is_rotary=kinds, **read)
