"""The decoder of Gemma 2 and 3, with a norm before and behind each product. Source: Gemma Team,
"Gemma 3 technical report", 2025."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layers.norm import LayerNorm, Norm, RMSNorm
from ..weights.names import CheckpointNames
from . import layered
from .layered import (
    FUSED_BIASES,
    FUSED_NAMES,
    JOINED_NAMES,
    LAYER_NAMES,
    MODEL_NAMES,
    LayeredModel,
)
from .parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(layered.Layer):
    attention_norm: RMSNorm | LayerNorm
    mlp_input_norm: Norm
    mlp_norm: RMSNorm | LayerNorm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp_norm(self.mlp(self.mlp_input_norm.add(self.attention_norm(x), residual)))


class Gemma3(LayeredModel):
    """See `Model`."""

    layer_norms = ("input_norm", "attention_norm", "mlp_input_norm", "mlp_norm")
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES
        | {
            "input_layernorm.weight": "input_norm",
            "post_attention_layernorm.weight": "attention_norm",
            "pre_feedforward_layernorm.weight": "mlp_input_norm",
            "post_feedforward_layernorm.weight": "mlp_norm",
        },
        fused=FUSED_NAMES | FUSED_BIASES,
        joined=JOINED_NAMES,
    )

    def _layer(self, parts: Parts, i: int) -> Layer:
        return Layer(**self._parts_of(parts, i))

    def _parts_of(self, parts: Parts, i: int) -> dict[str, Any]:
        prefix = f"layers.{i}."
        return {
            "input_norm": parts.input_norm(prefix + "input_norm", prefix + "qkv"),
            "attention": parts.attention(i),
            "attention_norm": parts.norm(prefix + "attention_norm"),
            "mlp_input_norm": parts.input_norm(prefix + "mlp_input_norm", prefix + "gate_up"),
            "mlp": parts.mlp(i),
            "mlp_norm": parts.norm(prefix + "mlp_norm"),
        }
