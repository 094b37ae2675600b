"""The decoder of StarCoder 2. Source: Lozhkov et al., "StarCoder 2 and The Stack v2", 2024."""

from __future__ import annotations

from ..weights.names import CheckpointNames
from .decoder import Decoder
from .layered import FUSED_BIASES, FUSED_NAMES, JOINED_NAMES, LAYER_NAMES, MODEL_NAMES


class Starcoder2(Decoder):
    """See `Model`."""

    names = CheckpointNames(
        model=MODEL_NAMES | {"model.norm.bias": "final_norm_bias"},
        layer=LAYER_NAMES
        | {
            "input_layernorm.weight": "input_norm",
            "input_layernorm.bias": "input_norm_bias",
            "post_attention_layernorm.weight": "post_norm",
            "post_attention_layernorm.bias": "post_norm_bias",
            "mlp.c_fc.weight": "up",
            "mlp.c_fc.bias": "up_bias",
            "mlp.c_proj.weight": "down",
            "mlp.c_proj.bias": "down_bias",
        },
        fused=FUSED_NAMES | FUSED_BIASES,
        joined=JOINED_NAMES,
    )
