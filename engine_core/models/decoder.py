"""The decoder of Llama and of all that add to it biases, norms of queries and keys, windows,
multipliers, rotary positions of another kind, or experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layers.experts import Experts
from ..layers.norm import Norm
from ..weights.model_config import ModelConfig
from ..weights.names import CheckpointNames
from . import layered
from .experts.mixture import EXPERT_NAMES, MIXTURE_NAMES, SHARED_NAMES
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
    post_norm: Norm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if isinstance(self.mlp, Experts):
            return self.mlp.behind(x, residual)
        return self.mlp(self.post_norm.add(x, residual))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLayer(Layer):
    """A layer that scales what it adds to the residual stream."""

    scale: float

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_norm.add(x * self.scale, residual)) * self.scale


class Decoder(LayeredModel):
    layer_norms = ("input_norm", "post_norm")
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer=LAYER_NAMES
        | MIXTURE_NAMES
        | {
            "input_layernorm.weight": "input_norm",
            "post_attention_layernorm.weight": "post_norm",
        },
        fused=FUSED_NAMES | FUSED_BIASES | SHARED_NAMES,
        experts=EXPERT_NAMES,
        joined=JOINED_NAMES,
    )

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        has_biases = config.o_bias or config.mlp_bias
        return config.residual_scale == 1 and not has_biases and config.experts is None

    def _layer(self, parts: Parts, i: int) -> layered.Layer:
        prefix = f"layers.{i}."
        post_norm = parts.norm_of_mlp(prefix + "post_norm", i)
        common: dict[str, Any] = {
            "input_norm": parts.norm_of_mixer(prefix + "input_norm", i),
            "attention": parts.mixer(i),
            "post_norm": post_norm,
            "mlp": parts.mlp(i, post_norm),
        }
        scale = self.config.residual_scale
        return Layer(**common) if scale == 1 else ScaledLayer(**common, scale=scale)
