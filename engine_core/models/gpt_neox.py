"""The decoder of GPT-NeoX and Pythia: attention and MLP side by side, each with a norm. Source:
Black et al., "GPT-NeoX-20B", 2022."""

from __future__ import annotations

from typing import Any

import torch

from ..weights.model_config import ModelConfig
from ..weights.names import CheckpointNames
from .cohere2 import ParallelLayer
from .decoder import Layer
from .layered import UNCHANGED_NAMES, LayeredModel
from .parts import Parts


def by_part(weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of queries, keys and values of each head in turn → all queries, all keys, all values."""
    heads = weight.view(config.num_heads, 3, config.head_dim, *weight.shape[1:])
    return heads.transpose(0, 1).reshape(weight.shape)


class GptNeoX(LayeredModel):
    """See `Model`."""

    layer_norms = ("input_norm", "post_norm")
    names = CheckpointNames(
        model={
            "model.embed_in.weight": "embed",
            "model.final_layer_norm.weight": "final_norm",
            "model.final_layer_norm.bias": "final_norm_bias",
            "model.embed_out.weight": "lm_head",
            "lm_head.weight": "lm_head",
        },
        layer={
            "input_layernorm.weight": "input_norm",
            "input_layernorm.bias": "input_norm_bias",
            "post_attention_layernorm.weight": "post_norm",
            "post_attention_layernorm.bias": "post_norm_bias",
            "attention.query_key_value.weight": "qkv",
            "attention.query_key_value.bias": "qkv_bias",
            "attention.dense.weight": "o",
            "attention.dense.bias": "o_bias",
            "mlp.dense_h_to_4h.weight": "up",
            "mlp.dense_h_to_4h.bias": "up_bias",
            "mlp.dense_4h_to_h.weight": "down",
            "mlp.dense_4h_to_h.bias": "down_bias",
        },
        fused={},
        changed={"qkv": by_part, "qkv_bias": by_part},
        unchanged=UNCHANGED_NAMES,
        ignored=(".attention.bias", ".attention.masked_bias", ".inv_freq"),
    )

    def _layer(self, parts: Parts, i: int) -> Layer | ParallelLayer:
        prefix = f"layers.{i}."
        input_norm = parts.input_norm(prefix + "input_norm", prefix + "qkv")
        post_norm = parts.input_norm(prefix + "post_norm", prefix + "up")
        common: dict[str, Any] = {
            "input_norm": input_norm,
            "attention": parts.attention(i),
            "mlp": parts.mlp(i),
        }
        if self.config.is_parallel:
            return ParallelLayer(**common, mlp_input_norm=post_norm)
        return Layer(**common, post_norm=post_norm)
