"""Configs of GPT-NeoX and Pythia."""

from __future__ import annotations

from ...weights.model_config import ModelConfig, activation_of
from ...weights.rope.config import positive_of
from .fields import Config


def read_gpt_neox(config: Config) -> ModelConfig:
    bias = bool(config.get("attention_bias", True))
    share = config.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    named = {"partial_rotary_factor": share}
    if "rotary_emb_base" in config:
        named["rope_theta"] = config["rotary_emb_base"]
    return ModelConfig.from_hf(
        # Each query head has a key head, whatever the config says.
        {**named, **config, "num_key_value_heads": None},
        rotates_parts=True,
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=positive_of(config, "layer_norm_eps", 1e-5),
        activation=activation_of(config, default="gelu"),
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        is_parallel=bool(config.get("use_parallel_residual", True)),
    )
