"""The decoder of OPT. Source: Zhang et al., "OPT: open pre-trained transformer language models",
2022."""

from __future__ import annotations

from ..weights.names import CheckpointNames
from .decoder import Decoder


class Opt(Decoder):
    """See `Model`."""

    names = CheckpointNames(
        model={
            "model.embed_tokens.weight": "embed",
            "model.embed_positions.weight": "positions",
            "model.final_layer_norm.weight": "final_norm",
            "model.final_layer_norm.bias": "final_norm_bias",
            "lm_head.weight": "lm_head",
        },
        layer={
            "self_attn_layer_norm.weight": "input_norm",
            "self_attn_layer_norm.bias": "input_norm_bias",
            "final_layer_norm.weight": "post_norm",
            "final_layer_norm.bias": "post_norm_bias",
            "self_attn.out_proj.weight": "o",
            "self_attn.out_proj.bias": "o_bias",
            "fc1.weight": "up",
            "fc1.bias": "up_bias",
            "fc2.weight": "down",
            "fc2.bias": "down_bias",
        },
        fused={
            f"self_attn.{name}_proj.{kind}": (ours, i)
            for kind, ours in (("weight", "qkv"), ("bias", "qkv_bias"))
            for i, name in enumerate("qkv")
        },
    )
