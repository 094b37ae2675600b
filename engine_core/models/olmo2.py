"""The decoder of OLMo 2 and 3 and of EXAONE 4: norms stand behind products, none before them.
Source: Team OLMo, "2 OLMo 2 Furious", 2025."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layers.norm import LayerNorm, NoNorm, RMSNorm
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
    mlp_norm: RMSNorm | LayerNorm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp_norm(self.mlp(residual.add_(self.attention_norm(x))))


class Olmo2(LayeredModel):
    """See `Model`."""

    layer_norms = ("attention_norm", "mlp_norm")
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES
        | {
            "post_attention_layernorm.weight": "attention_norm",
            "post_feedforward_layernorm.weight": "mlp_norm",
        },
        fused=FUSED_NAMES | FUSED_BIASES,
        joined=JOINED_NAMES,
    )

    def _layer(self, parts: Parts, i: int) -> Layer:
        prefix = f"layers.{i}."
        for reader in ("qkv", "gate_up"):
            parts.check_unrounded(prefix + reader)
        return Layer(
            input_norm=NoNorm(),
            attention=parts.attention(i),
            attention_norm=parts.norm(prefix + "attention_norm"),
            mlp=parts.mlp(i),
            mlp_norm=parts.norm(prefix + "mlp_norm"),
        )
