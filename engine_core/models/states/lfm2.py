"""The decoder of LFM2: short convolutions in most layers, attention in the others. Source: Liquid
AI, "LFM2 technical report", 2025."""

from __future__ import annotations

from dataclasses import replace

from ..decoder import Decoder
from ..experts.mixture import CORRECTION, DOWN, GATE_UP, ROUTER
from .conv_parts import CONV_NAMES, TAPS
from .delta_parts import conv_of

MODEL_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.embedding_norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
LAYER_NAMES = {
    "self_attn.out_proj.weight": "o",
    "self_attn.q_layernorm.weight": "q_norm",
    "self_attn.k_layernorm.weight": "k_norm",
    "operator_norm.weight": "input_norm",
    "ffn_norm.weight": "post_norm",
    "feed_forward.w2.weight": "down",
    "feed_forward.gate.weight": ROUTER,
    "feed_forward.expert_bias": CORRECTION,
    "feed_forward.experts.gate_up_proj": GATE_UP,
    "feed_forward.experts.down_proj": DOWN,
    **CONV_NAMES,
}
GATE_NAMES = {"feed_forward.w1.weight": ("gate_up", 0), "feed_forward.w3.weight": ("gate_up", 1)}


class Lfm2(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        model=MODEL_NAMES,
        layer=LAYER_NAMES,
        fused={**Decoder.names.fused, **GATE_NAMES},
        changed={TAPS: conv_of},
    )
