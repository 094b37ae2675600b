"""Configs of Gemma 4, text and the text part of models that read images and sound."""

from __future__ import annotations

from typing import Any

from ...config import ConfigError, require
from ...weights.experts_config import ExpertsConfig
from ...weights.mixed_layers import MixedLayers
from ...weights.model_config import MAX_SIZES, ModelConfig, size_of
from ...weights.rope.config import mapping_of, positive_of
from .fields import (
    FULL,
    SLIDING,
    Config,
    count_of,
    every,
    kinds_of_layers,
    windows,
    with_experts,
)
from .gemma3 import ACTIVATION, LOCAL_THETA, PATTERN, rope_of_kinds

ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": LOCAL_THETA},
}
"""Rotary positions where a config does not say."""
HEAD_DIM = 256
GLOBAL_HEAD_DIM = 512
INPUT_SIZE = "hidden_size_per_layer_input"


def read_gemma4(config: Config) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    _check(config)
    rope, local = rope_of_kinds(
        {**config, "rope_parameters": config.get("rope_parameters") or ROPE}
    )
    kinds = kinds_of_layers(config, every(config, "sliding_window_pattern", PATTERN))
    read = windows(config, (*kinds[:-1], False), default=512, by_kind=True)
    own = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    flat = {"tie_word_embeddings": True, "head_dim": HEAD_DIM, **own, "rope_parameters": rope}
    if not config.get("num_key_value_heads"):
        flat["num_key_value_heads"] = config.get("num_attention_heads")
    model = ModelConfig.from_hf(
        flat,
        activation="gelu_tanh",
        qk_norm=True,
        value_norm=True,
        attention_scale=1.0,
        logit_softcap=_cap(config),
        embedding_scale=size_of(config, "hidden_size") ** 0.5,
        local_rope_theta=positive_of(local, "rope_theta", LOCAL_THETA),
        fits_float16=False,
        mixed=_mixed(config, read.get("is_windowed", (False,) * len(kinds))),
        **read,
    )
    return with_experts(model, _experts(config)) if config.get("enable_moe_block") else model


def _experts(config: Config) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=count_of(config, "num_experts"),
        num_chosen=count_of(config, "top_k_experts"),
        intermediate_size=count_of(config, "moe_intermediate_size"),
        is_normalized=True,
        are_beside_mlp=True,
    )


def _check(config: Config) -> None:
    activation = config.get("hidden_activation", ACTIVATION)
    require(activation == ACTIVATION, "hidden_activation", activation, ACTIVATION)
    # Tokens of images see each other both ways; these are no part of a text.
    both_ways = config.get("use_bidirectional_attention")
    require(both_ways in (None, False, "vision"), "use_bidirectional_attention", both_ways, "none")
    bias = config.get("attention_bias")
    require(not bias, "attention_bias", bias, "false")


def _cap(config: Config) -> float:
    """0: there is none."""
    name = "final_logit_softcapping"
    return 0.0 if config.get(name) is None else positive_of(config, name)


def _mixed(config: Config, is_windowed: tuple[bool, ...]) -> MixedLayers:
    shapes = _global_shapes(config)
    head_dim = count_of(shapes, "head_dim", GLOBAL_HEAD_DIM)
    num_heads = size_of(config, "num_attention_heads")
    kv_heads = count_of(shapes, "num_key_value_heads", config.get("num_key_value_heads"))
    divides = num_heads % kv_heads == 0
    require(divides, "num_global_key_value_heads", kv_heads, f"a divisor of {num_heads}")
    num_layers = len(is_windowed)
    num_sharing = config.get("num_kv_shared_layers") or 0
    is_number = type(num_sharing) is int and 0 <= num_sharing < num_layers
    require(is_number, "num_kv_shared_layers", num_sharing, f"0…{num_layers - 1}")
    kinds = {*is_windowed[: num_layers - num_sharing]}
    has_all = kinds == {*is_windowed}
    require(has_all, "num_kv_shared_layers", num_sharing, "fewer: a layer of each kind before them")
    inner = size_of(config, "intermediate_size")
    is_wide = bool(config.get("use_double_wide_mlp", False))
    given = {INPUT_SIZE: config.get(INPUT_SIZE, 256) or 0}
    input_size = count_of(given, INPUT_SIZE, least=0)
    return MixedLayers(
        global_head_dim=head_dim,
        global_kv_heads=kv_heads,
        reuses_keys=bool(config.get("attention_k_eq_v", False)),
        num_sharing=num_sharing,
        sharing_width=2 * inner if is_wide else inner,
        input_size=input_size,
        num_inputs=_num_inputs(config) if input_size else 0,
    )


def _num_inputs(config: Config) -> int:
    """Rows of the table of layers' vectors: one for each token id at least."""
    name = "vocab_size_per_layer_input"
    most = MAX_SIZES["vocab_size"]
    least = size_of(config, "vocab_size")
    rows = config.get(name, 262_144)
    is_count = type(rows) is int and least <= rows <= most
    require(is_count, name, rows, f"a whole number, {least}…{most}")
    return int(rows)


def _global_shapes(config: Config) -> dict[str, Any]:
    """Shapes of layers with full attention, where they differ: fields of the config or, in newer
    files, fields of each such layer, which agree."""
    by_layer = mapping_of(config, "per_layer_config")
    if not by_layer:
        named = {"head_dim": config.get("global_head_dim")}
        if config.get("attention_k_eq_v"):
            named["num_key_value_heads"] = config.get("num_global_key_value_heads")
        return {name: value for name, value in named.items() if value is not None}
    shapes = [dict(each) for each in by_layer.values() if isinstance(each, dict)]
    known = {"head_dim", "num_key_value_heads"}
    if not shapes or any(each != shapes[0] for each in shapes) or not shapes[0].keys() <= known:
        allowed = "head_dim and num_key_value_heads, the same for every layer that sees all keys"
        raise ConfigError("per_layer_config", by_layer, allowed)
    return shapes[0]
