"""Configs of OPT."""

from __future__ import annotations

from ...config import require
from ...weights.model_config import ModelConfig, activation_of, size_of
from .fields import Config

OFFSET = 2
"""Row of position 0 in the table of positions."""
EPS = 1e-5


def read_opt(config: Config) -> ModelConfig:
    hidden = config.get("hidden_size")
    width = config.get("word_embed_proj_dim") or hidden
    require(width == hidden, "word_embed_proj_dim", width, f"{hidden}, as hidden_size")
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        require(config.get(name, True), name, config.get(name), "true")
    without_norm = config.get("_remove_final_layer_norm", False)
    require(not without_norm, "_remove_final_layer_norm", without_norm, "false")
    bias = bool(config.get("enable_bias", True))
    num_positions = size_of(config, "max_position_embeddings")
    sizes = {"intermediate_size": config.get("ffn_dim"), "num_key_value_heads": None}
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config, **sizes},
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=EPS,
        activation=activation_of(config, "activation_function", "relu"),
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        is_rotary=(False,) * size_of(config, "num_hidden_layers"),
        num_learned_positions=num_positions + OFFSET,
        position_offset=OFFSET,
    )
