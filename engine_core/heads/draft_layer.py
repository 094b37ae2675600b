"""The one decoder layer of EAGLE, like Llama's except for its inputs: names, shapes, forward
pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch, last_tokens
from ..layers.linear.kinds import Weights
from ..layers.mixers.attention import Attention
from ..layers.mlp import Mlp
from ..layers.norm import RMSNorm
from ..layers.platform import Platform
from ..layers.rope import cos_sin_table
from ..models.layered import FUSED_BIASES, FUSED_NAMES
from ..models.model import LastTokens
from ..weights.layout import Layout, linear, norm, table
from ..weights.model_config import ModelConfig
from .checkpoint import Shapes

FUSED = FUSED_NAMES | FUSED_BIASES
NAMES = {
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.o_proj.weight": "o",
    "mlp.down_proj.weight": "down",
}


def published_shapes(config: ModelConfig, in_features: int) -> Shapes:
    """Shapes by name, behind the layer's prefix. `in_features`: of the projections before
    attention."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    head_dim = config.head_dim
    q_size = config.num_heads * head_dim
    kv_size = config.num_kv_heads * head_dim
    return {
        "self_attn.q_proj.weight": (q_size, in_features),
        "self_attn.k_proj.weight": (kv_size, in_features),
        "self_attn.v_proj.weight": (kv_size, in_features),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def published_biases(config: ModelConfig) -> Shapes:
    """Shapes of biases, which a layer may lack; otherwise as `published_shapes`."""
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return {f"self_attn.{name}_proj.bias": (q_size if name == "q" else kv_size,) for name in "qkv"}


def layout(config: ModelConfig, in_features: int, names: Collection[str]) -> Layout:
    """Layout of the layer under our names. `names`: tensors that the file has."""
    hidden = config.hidden_size
    q_size = config.num_heads * config.head_dim
    return {
        "layers.0.qkv": linear(config.qkv_size, in_features),
        "layers.0.o": linear(hidden, q_size),
        "layers.0.post_norm": norm(hidden),
        "layers.0.gate_up": linear(2 * config.intermediate_size, hidden),
        "layers.0.down": linear(hidden, config.intermediate_size),
        **({"layers.0.qkv_bias": table(config.qkv_size)} if "layers.0.qkv_bias" in names else {}),
    }


class DraftLayer:
    """The layer over T tokens of hidden size H, of which the last few of each row go on behind
    attention."""

    def __init__(
        self, platform: Platform, config: ModelConfig, weights: Weights, max_model_len: int
    ) -> None:
        linears = weights.linears
        tensors = weights.tensors
        eps = config.rms_norm_eps
        self._platform = platform
        self._attention = Attention(
            platform,
            linears["layers.0.qkv"],
            linears["layers.0.o"],
            cos_sin_table(config, max_model_len).to(platform.device),
            qkv_bias=tensors.get("layers.0.qkv_bias"),
            eps=eps,
        )
        self._post_norm = RMSNorm(platform, tensors["layers.0.post_norm"], eps)
        self._mlp = Mlp(platform, linears["layers.0.gate_up"], linears["layers.0.down"], "silu")

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        """The last num_wanted[r] tokens of each row, [R]."""
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        ends: LastTokens | None = None,
    ) -> torch.Tensor:
        """Residual stream behind the layer, [T, H], or [E, H] of the last tokens, which have an
        attention plan of their own, for x [T, in features] and residual [T, H]. kv_cache [2,
        num_blocks, Hk, block_size, D] takes keys and values."""
        queries = self._attention.queries(x, batch, kv_cache)
        if ends is not None:
            if not len(ends.tokens):
                return residual[:0]
            queries = queries.index_select(0, ends.tokens)
            residual = residual.index_select(0, ends.tokens)
            attention_plan = ends.attention_plan
        attended = self._attention.attend(queries, kv_cache, attention_plan)
        return self._mlp(self._post_norm.add(attended, residual)).add_(residual)
