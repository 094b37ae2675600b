"""The decoder of Cohere 2: attention and MLP read the same norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layers.norm import Norm
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
class ParallelLayer(layered.Layer):
    mlp_input_norm: Norm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.mlp_input_norm(residual))


class Cohere2(LayeredModel):
    """See `Model`."""

    layer_norms = ("input_norm",)
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES | {"input_layernorm.weight": "input_norm"},
        fused=FUSED_NAMES | FUSED_BIASES,
        joined=JOINED_NAMES,
    )

    def _layer(self, parts: Parts, i: int) -> ParallelLayer:
        prefix = f"layers.{i}."
        return ParallelLayer(
            input_norm=parts.input_norm(prefix + "input_norm", prefix + "qkv"),
            attention=parts.attention(i),
            mlp_input_norm=parts.input_norm(prefix + "input_norm", prefix + "gate_up"),
            mlp=parts.mlp(i),
        )
