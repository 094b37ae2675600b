"""The decoder of Gemma 3. Source: Gemma Team, "Gemma 3 technical report", 2025."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear
from ..layers.lm_head import LMHead
from ..layers.mlp import Mlp
from ..layers.norm import InputNorm, RMSNorm
from ..layers.platform import Platform
from ..layers.rope import cos_sin_table
from ..weights.layout import Layout, norm
from ..weights.names import CheckpointNames
from . import layered
from .gemma3_config import Gemma3Config
from .layered import FUSED_NAMES, MODEL_NAMES, LayeredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(layered.Layer):
    attention_norm: RMSNorm
    mlp_input_norm: InputNorm
    mlp_norm: RMSNorm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp_norm(self.mlp(self.mlp_input_norm.add(self.attention_norm(x), residual)))


class Gemma3(LayeredModel):
    """See `Model`. Five of six layers see a window of keys and have a rotary base of their own."""

    config: Gemma3Config
    adds_products = False
    """A norm stands between each product and the residual stream."""
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer={
            "input_layernorm.weight": "input_norm",
            "post_attention_layernorm.weight": "attention_norm",
            "pre_feedforward_layernorm.weight": "mlp_input_norm",
            "post_feedforward_layernorm.weight": "mlp_norm",
            "self_attn.o_proj.weight": "o",
            "self_attn.q_norm.weight": "q_norm",
            "self_attn.k_norm.weight": "k_norm",
            "mlp.down_proj.weight": "down",
        },
        fused=FUSED_NAMES,
    )

    def __init__(
        self, config: Gemma3Config, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        self.config = config
        self._platform = platform
        local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        tables = [cos_sin_table(own, max_model_len).to(platform.device) for own in (config, local)]
        self._cos_sin, self._local_cos_sin = tables
        self.embedding = Embedding(weights.table("embed"), scale=config.hidden_size**0.5)
        self.dtype = self.embedding.dtype
        self.layers = [
            self._layer(weights, f"layers.{i}.", kind) for i, kind in enumerate(config.is_windowed)
        ]
        self.final_norm = self._norm(weights, "final_norm")
        self.lm_head = LMHead(platform, weights.linears["lm_head"])

    @staticmethod
    def layout(config: Gemma3Config) -> Layout:
        norms = ("input_norm", "attention_norm", "mlp_input_norm", "mlp_norm")
        layer = {name: norm(config.hidden_size) for name in norms}
        layer |= {name: norm(config.head_dim) for name in ("q_norm", "k_norm")}
        return layered.layout_of(config, layer | layered.products_of(config))

    def _some_layers(self, num_layers: int) -> Iterable[int]:
        """One of each kind, however many are asked for."""
        is_windowed = self.config.is_windowed
        return sorted({is_windowed.index(kind) for kind in is_windowed} | {len(is_windowed) - 1})

    def _layer(self, weights: Weights, prefix: str, is_windowed: bool) -> Layer:
        own = {name: weights.linears[prefix + name] for name in ("qkv", "o", "gate_up", "down")}
        return Layer(
            input_norm=self._input_norm(weights, prefix + "input_norm", own["qkv"]),
            attention=Attention(
                self._platform,
                own["qkv"],
                own["o"],
                self._local_cos_sin if is_windowed else self._cos_sin,
                q_norm=self._norm(weights, prefix + "q_norm").weight,
                k_norm=self._norm(weights, prefix + "k_norm").weight,
                eps=self.config.rms_norm_eps,
                scale=self.config.attention_scale,
                window=self.config.sliding_window if is_windowed else 0,
            ),
            attention_norm=self._norm(weights, prefix + "attention_norm"),
            mlp_input_norm=self._input_norm(weights, prefix + "mlp_input_norm", own["gate_up"]),
            mlp=Mlp(self._platform, own["gate_up"], own["down"], "gelu_tanh"),
            mlp_norm=self._norm(weights, prefix + "mlp_norm"),
        )

    def _norm(self, weights: Weights, name: str) -> RMSNorm:
        return RMSNorm(self._platform, _factors(weights, name), self.config.rms_norm_eps)

    def _input_norm(self, weights: Weights, name: str, reader: Linear) -> InputNorm:
        return InputNorm(self._platform, _factors(weights, name), self.config.rms_norm_eps, reader)


def _factors(weights: Weights, name: str) -> torch.Tensor:
    """Norms multiply by 1 + weight, a sum that only float32 holds."""
    return 1 + weights.tensors[name].float()
