"""The decoder of GLM-4: norms as Gemma's, by other names."""

from __future__ import annotations

from ..weights.names import CheckpointNames
from .gemma3 import Gemma3
from .layered import FUSED_BIASES, FUSED_NAMES, JOINED_NAMES, LAYER_NAMES, MODEL_NAMES


class Glm4(Gemma3):
    """See `Model`."""

    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES
        | {
            "input_layernorm.weight": "input_norm",
            "post_self_attn_layernorm.weight": "attention_norm",
            "post_attention_layernorm.weight": "mlp_input_norm",
            "post_mlp_layernorm.weight": "mlp_norm",
        },
        fused=FUSED_NAMES | FUSED_BIASES,
        joined=JOINED_NAMES,
    )
