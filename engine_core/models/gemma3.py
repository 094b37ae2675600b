"""The decoder of Gemma 3. Source: Gemma Team, "Gemma 3 technical report", 2025."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch, last_tokens
from ..layers.embedding import Embedding
from ..layers.kinds import Weights
from ..layers.linear import Linear
from ..layers.lm_head import LMHead
from ..layers.mlp import Mlp
from ..layers.norm import InputNorm, RMSNorm
from ..layers.platform import Platform
from ..layers.rope import cos_sin_table
from ..weights.layout import Layout, Split, joined_linear, linear, norm, table
from ..weights.names import CheckpointNames
from .gemma3_config import Gemma3Config
from .model import LastNorm, LastTokens, LayerInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    input_norm: InputNorm
    attention: Attention
    attention_norm: RMSNorm
    mlp_input_norm: InputNorm
    mlp: Mlp
    mlp_norm: RMSNorm


class Gemma3:
    """See `Model`. Five of six layers see a window of keys and have a rotary base of their own."""

    adds_products = False
    """A norm stands between each product and the residual stream."""
    names = CheckpointNames(
        model={"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"},
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
        fused={
            "self_attn.q_proj.weight": ("qkv", 0),
            "self_attn.k_proj.weight": ("qkv", 1),
            "self_attn.v_proj.weight": ("qkv", 2),
            "mlp.gate_proj.weight": ("gate_up", 0),
            "mlp.up_proj.weight": ("gate_up", 1),
        },
    )

    def __init__(self, config: Gemma3Config, weights: Weights, platform: Platform, max_model_len: int) -> None:
        self.config, self._platform = config, platform
        local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        tables = [cos_sin_table(own, max_model_len).to(platform.device) for own in (config, local)]
        self._cos_sin, self._local_cos_sin = tables
        self.embedding = Embedding(weights.table("embed"), scale=config.hidden_size**0.5)
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(weights, f"layers.{i}.", kind) for i, kind in enumerate(config.is_windowed)]
        self.final_norm: LastNorm = self._norm(weights, "final_norm")
        self.lm_head = LMHead(platform, weights.linears["lm_head"])

    @staticmethod
    def layout(config: Gemma3Config) -> Layout:
        hidden, norms = config.hidden_size, ("input_norm", "attention_norm", "mlp_input_norm", "mlp_norm")
        layer = {
            **{name: norm(hidden) for name in norms},
            **{name: norm(config.head_dim) for name in ("q_norm", "k_norm")},
            "qkv": joined_linear(config.qkv_sizes, hidden),
            "o": linear(hidden, config.num_heads * config.head_dim, split=Split.INPUTS),
            "gate_up": joined_linear((config.intermediate_size, config.intermediate_size), hidden),
            "down": linear(hidden, config.intermediate_size, split=Split.INPUTS),
        }
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
        for i in range(last + 1) if num_layers is None else self._one_of_each_kind():
            layer = self.layers[i]
            if inputs is not None:
                inputs.take(i, residual)
            queries = layer.attention.queries(x, batch, kv_cache[i])
            if i == last and ends is not None:
                if not len(ends.tokens):
                    return residual[:0]
                queries, residual = queries.index_select(0, ends.tokens), residual.index_select(0, ends.tokens)
                attention_plan = ends.attention_plan
            x = layer.attention_norm(layer.attention.attend(queries, kv_cache[i], attention_plan))
            x = layer.mlp_norm(layer.mlp(layer.mlp_input_norm.add(x, residual)))
            x = (self.final_norm if i == last else self.layers[i + 1].input_norm).add(x, residual)
        # Nothing rounds what the last norm makes.
        assert isinstance(x, torch.Tensor)
        return x

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def _one_of_each_kind(self) -> list[int]:
        """Layers that launch together what all launch, in their order; the last is one of them."""
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
