"""The decoder of Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch, last_tokens
from ..layers.embedding import Embedding
from ..layers.kinds import Weights
from ..layers.lm_head import LMHead
from ..layers.mlp import Mlp
from ..layers.norm import InputNorm, RMSNorm
from ..layers.platform import Platform
from ..layers.rope import cos_sin_table
from ..model_config import ModelConfig
from ..weights.layout import Layout, Split, joined_bias, joined_linear, linear, norm, table
from ..weights.names import CheckpointNames
from .model import LastNorm, LastTokens, LayerInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    input_norm: InputNorm
    attention: Attention
    post_norm: InputNorm
    mlp: Mlp


class Decoder:
    """See `Model`."""

    adds_products = True
    names = CheckpointNames(
        model={
            "model.embed_tokens.weight": "embed",
            "model.norm.weight": "final_norm",
            "lm_head.weight": "lm_head",
        },
        layer={
            "input_layernorm.weight": "input_norm",
            "post_attention_layernorm.weight": "post_norm",
            "self_attn.o_proj.weight": "o",
            "self_attn.q_norm.weight": "q_norm",
            "self_attn.k_norm.weight": "k_norm",
            "mlp.down_proj.weight": "down",
        },
        fused={
            "self_attn.q_proj.weight": ("qkv", 0),
            "self_attn.k_proj.weight": ("qkv", 1),
            "self_attn.v_proj.weight": ("qkv", 2),
            "self_attn.q_proj.bias": ("qkv_bias", 0),
            "self_attn.k_proj.bias": ("qkv_bias", 1),
            "self_attn.v_proj.bias": ("qkv_bias", 2),
            "mlp.gate_proj.weight": ("gate_up", 0),
            "mlp.up_proj.weight": ("gate_up", 1),
        },
    )

    def __init__(self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int) -> None:
        self.config, self._platform = config, platform
        self.cos_sin = cos_sin_table(config, max_model_len).to(platform.device)
        self.embedding = Embedding(weights.table("embed"))
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.final_norm: LastNorm = RMSNorm(platform, weights.tensors["final_norm"], config.rms_norm_eps)
        self.lm_head = LMHead(platform, weights.linears["lm_head"])

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        hidden, q_size, head_dim = config.hidden_size, config.num_heads * config.head_dim, config.head_dim
        layer = {
            "input_norm": norm(hidden),
            "qkv": joined_linear(config.qkv_sizes, hidden),
            "o": linear(hidden, q_size, split=Split.INPUTS),
            "post_norm": norm(hidden),
            "gate_up": joined_linear((config.intermediate_size, config.intermediate_size), hidden),
            "down": linear(hidden, config.intermediate_size, split=Split.INPUTS),
        }
        if config.qkv_bias:
            layer["qkv_bias"] = joined_bias(config.qkv_sizes)
        if config.qk_norm:
            layer |= {"q_norm": norm(head_dim), "k_norm": norm(head_dim)}
        tied_to = "embed" if config.tie_word_embeddings else ""
        return {
            "embed": table(config.vocab_size, hidden, split=Split.VOCABULARY),
            "final_norm": norm(hidden),
            "lm_head": linear(config.vocab_size, hidden, tied_to=tied_to, split=Split.VOCABULARY),
            **{f"layers.{i}.{name}": spec for i in range(config.num_layers) for name, spec in layer.items()},
        }

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        last = len(self.layers) - 1
        attention_plan = attention_plan or self._platform.plan_attention(batch)
        residual = self.embedding(batch.token_ids)
        x = self.layers[0].input_norm(residual)
        for i in [*range(last if num_layers is None else min(num_layers - 1, last)), last]:
            layer = self.layers[i]
            if inputs is not None:
                inputs.take(i, residual)
            queries = layer.attention.queries(x, batch, kv_cache[i])
            if i == last and ends is not None:
                if not len(ends.tokens):
                    return residual[:0]
                queries, residual = queries.index_select(0, ends.tokens), residual.index_select(0, ends.tokens)
                attention_plan = ends.attention_plan
            x = layer.attention.attend(queries, kv_cache[i], attention_plan)
            x = layer.mlp(layer.post_norm.add(x, residual))
            x = (self.final_norm if i == last else self.layers[i + 1].input_norm).add(x, residual)
        # Nothing rounds what the last norm makes.
        assert isinstance(x, torch.Tensor)
        return x

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        linears, tensors = weights.linears, weights.tensors
        platform, eps = self._platform, self.config.rms_norm_eps
        return Layer(
            input_norm=InputNorm(platform, tensors[prefix + "input_norm"], eps, linears[prefix + "qkv"]),
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
            post_norm=InputNorm(platform, tensors[prefix + "post_norm"], eps, linears[prefix + "gate_up"]),
            mlp=Mlp(platform, linears[prefix + "gate_up"], linears[prefix + "down"], "silu"),
        )
