"""Config of MiMo V2 Flash: values whose heads are shorter than those of keys, windows with sinks
and more key heads in most layers, and experts chosen by corrected sigmoids. Source: Xiaomi,
"MiMo-V2-Flash technical report", 2026."""

from __future__ import annotations

from typing import Any

from ....config import ConfigError, require
from ....weights.experts_config import ExpertsConfig
from ....weights.mixed_layers import MixedLayers
from ....weights.model_config import ModelConfig, size_of
from ....weights.rope.config import positive_of
from ..fields import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    Config,
    count_of,
    kinds_of_layers,
    layers_with_experts,
    windows,
    with_experts,
)
from ..gemma3 import rope_of_kinds

LOCAL_THETA = 10_000.0
SHARE = "partial_rotary_factor"
DEFAULTS = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "rope_theta": 5_000_000.0,
    SHARE: 0.334,
}
PUBLISHED_LISTS = {
    "layer_types": ("hybrid_layer_pattern", (FULL, SLIDING)),
    "mlp_layer_types": ("moe_layer_freq", (DENSE, SPARSE)),
}
"""Fields that published files have under another name, as numbers."""
SERVED = {
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
}
"""Fields with a single supported value, which all published checkpoints have."""


def read_mimo_v2_flash(config: Config) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    flat = _flat(config)
    _check(flat)
    head_dim = count_of(flat, "head_dim")
    kv_heads = size_of(flat, "num_key_value_heads")
    rope, local = ({SHARE: flat[SHARE], **each} for each in rope_of_kinds(flat))
    is_one = local[SHARE] == rope[SHARE]
    require(is_one, f"rope_parameters.{SLIDING}.{SHARE}", local[SHARE], f"{rope[SHARE]}")
    kinds = kinds_of_layers(flat, lambda i: i > 0 and (i + 1) % 6 != 0)
    of_windows = {
        "num_key_value_heads": count_of(flat, "swa_num_key_value_heads", 2 * kv_heads),
        "rope_parameters": rope,
    }
    read = ModelConfig.from_hf(
        {name: value for name, value in flat.items() if name != "rope_theta"} | of_windows,
        rotates_parts=True,
        local_rope_theta=positive_of(local, "rope_theta"),
        attention_scale=head_dim**-0.5,
        value_dim=count_of(flat, "v_head_dim"),
        value_scale=positive_of(flat, "attention_value_scale"),
        has_sinks=True,
        mixed=MixedLayers(
            global_head_dim=head_dim, global_kv_heads=kv_heads, has_global_sinks=False
        ),
        **windows(flat, kinds, by_kind=True),
    )
    return with_experts(read, _experts(flat))


def _flat(config: Config) -> dict[str, Any]:
    """The config with the names of transformers, and with what it does not say. Published files
    count keys before a position's own as its window."""
    given = {name: value for name, value in config.items() if value is not None}
    flat = {**DEFAULTS, **given}
    if "sliding_window_size" in given:
        flat["sliding_window"] = count_of(given, "sliding_window_size") + 1
    for name, (published, words) in PUBLISHED_LISTS.items():
        if published in given:
            flat.setdefault(name, _words_of(given[published], published, words))
    flat.setdefault("rms_norm_eps", given.get("layernorm_epsilon", 1e-5))
    flat.setdefault("rope_local_base_freq", given.get("swa_rope_theta", LOCAL_THETA))
    return flat


def _words_of(kinds: object, field: str, words: tuple[str, str]) -> list[str]:
    """Names of layers' kinds, which a field has as 0 and 1. Raises `ConfigError`."""
    if not isinstance(kinds, list) or not {*kinds} <= {0, 1}:
        raise ConfigError(field, kinds, "a list of 0 and 1")
    return [words[kind] for kind in kinds]


def _check(flat: Config) -> None:
    """Raises `ConfigError` for a value that no published checkpoint has."""
    of_windows = {"swa_num_attention_heads": "num_attention_heads"} | {
        "swa_head_dim": "head_dim",
        "swa_v_head_dim": "v_head_dim",
    }
    served = SERVED | {name: flat.get(like) for name, like in of_windows.items()}
    for name, value in served.items():
        given = flat.get(name, value)
        require(given == value, name, given, str(value))
    key_dim = count_of(flat, "head_dim")
    is_shorter = count_of(flat, "v_head_dim") <= key_dim
    require(is_shorter, "v_head_dim", flat["v_head_dim"], f"at most head_dim ({key_dim})")


def _experts(flat: Config) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=count_of(flat, "n_routed_experts"),
        num_chosen=count_of(flat, "num_experts_per_tok"),
        intermediate_size=count_of(flat, "moe_intermediate_size"),
        is_sigmoid=True,
        is_normalized=bool(flat.get("norm_topk_prob", True)),
        scale=positive_of(flat, "routed_scaling_factor", 1.0),
        has_correction=True,
        has_wide_router=True,
        num_groups=count_of(flat, "n_group", 1),
        num_chosen_groups=count_of(flat, "topk_group", 1),
        is_sparse=layers_with_experts(flat, lambda i: i > 0),
    )
