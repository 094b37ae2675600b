"""The decoder of Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.linear.kinds import Weights
from ..layers.lm_head import LMHead
from ..layers.mlp import Mlp
from ..layers.norm import InputNorm, RMSNorm
from ..layers.platform import Platform
from ..layers.rope import cos_sin_table
from ..weights.layout import Layout, joined_bias, norm
from ..weights.model_config import ModelConfig
from ..weights.names import CheckpointNames
from . import layered
from .layered import FUSED_BIASES, FUSED_NAMES, MODEL_NAMES, LayeredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(layered.Layer):
    post_norm: InputNorm

    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_norm.add(x, residual))


class Decoder(LayeredModel):
    adds_products = True
    names = CheckpointNames(
        model=MODEL_NAMES,
        layer={
            "input_layernorm.weight": "input_norm",
            "post_attention_layernorm.weight": "post_norm",
            "self_attn.o_proj.weight": "o",
            "self_attn.q_norm.weight": "q_norm",
            "self_attn.k_norm.weight": "k_norm",
            "mlp.down_proj.weight": "down",
        },
        fused=FUSED_NAMES | FUSED_BIASES,
    )

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        self.config = config
        self._platform = platform
        self.cos_sin = cos_sin_table(config, max_model_len).to(platform.device)
        self.embedding = Embedding(weights.table("embed"))
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.final_norm = RMSNorm(platform, weights.tensors["final_norm"], config.rms_norm_eps)
        self.lm_head = LMHead(platform, weights.linears["lm_head"])

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        norms = {name: norm(config.hidden_size) for name in ("input_norm", "post_norm")}
        layer = norms | layered.products_of(config)
        if config.qkv_bias:
            layer["qkv_bias"] = joined_bias(config.qkv_sizes)
        if config.qk_norm:
            layer |= {"q_norm": norm(config.head_dim), "k_norm": norm(config.head_dim)}
        return layered.layout_of(config, layer)

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        linears = weights.linears
        tensors = weights.tensors
        platform = self._platform
        eps = self.config.rms_norm_eps
        return Layer(
            input_norm=InputNorm(
                platform, tensors[prefix + "input_norm"], eps, linears[prefix + "qkv"]
            ),
            attention=Attention(
                platform,
                linears[prefix + "qkv"],
                linears[prefix + "o"],
                self.cos_sin,
                qkv_bias=tensors.get(prefix + "qkv_bias"),
                q_norm=tensors.get(prefix + "q_norm"),
                k_norm=tensors.get(prefix + "k_norm"),
                eps=eps,
            ),
            post_norm=InputNorm(
                platform, tensors[prefix + "post_norm"], eps, linears[prefix + "gate_up"]
            ),
            mlp=Mlp(platform, linears[prefix + "gate_up"], linears[prefix + "down"], "silu"),
        )
