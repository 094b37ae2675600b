"""Configs of GPT-2."""

from __future__ import annotations

from ...config import require
from ...weights.model_config import ModelConfig, activation_of, size_of
from ...weights.rope.config import positive_of
from .fields import Config

NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
SWITCHES = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")


def read_gpt2(config: Config) -> ModelConfig:
    for name in SWITCHES:
        require(not config.get(name), name, config.get(name), "none")
    is_scaled = config.get("scale_attn_weights", True)
    require(is_scaled, "scale_attn_weights", is_scaled, "true")
    named = {ours: config.get(theirs, config.get(ours)) for ours, theirs in NAMES.items()}
    inner = config.get("n_inner") or 4 * size_of(named, "hidden_size")
    sizes = {**named, "intermediate_size": inner, "num_key_value_heads": None}
    return ModelConfig.from_hf(
        {"tie_word_embeddings": True, **config, **sizes},
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=positive_of(config, "layer_norm_epsilon", 1e-5),
        activation=activation_of(config, "activation_function", "gelu_new"),
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_rotary=(False,) * size_of(named, "num_hidden_layers"),
        num_learned_positions=size_of(named, "max_position_embeddings"),
    )
