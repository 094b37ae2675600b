"""The pass over a decoder's layers, whatever these compute behind their attention, and the weights
that all have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..executor import Int32Array
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch, last_tokens
from ..layers.embedding import Embedding
from ..layers.lm_head import LMHead
from ..layers.mlp import Mlp
from ..layers.norm import InputNorm
from ..layers.platform import Platform
from ..weights.layout import Layout, Split, WeightSpec, joined_linear, linear, norm, table
from ..weights.model_config import ModelConfig
from .model import LastNorm, LastTokens, LayerInputs

MODEL_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
FUSED_NAMES = {
    "self_attn.q_proj.weight": ("qkv", 0),
    "self_attn.k_proj.weight": ("qkv", 1),
    "self_attn.v_proj.weight": ("qkv", 2),
    "mlp.gate_proj.weight": ("gate_up", 0),
    "mlp.up_proj.weight": ("gate_up", 1),
}
FUSED_BIASES = {
    "self_attn.q_proj.bias": ("qkv_bias", 0),
    "self_attn.k_proj.bias": ("qkv_bias", 1),
    "self_attn.v_proj.bias": ("qkv_bias", 2),
}
"""Published names of parts of a tensor; see `CheckpointNames`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(ABC):
    input_norm: InputNorm
    attention: Attention
    mlp: Mlp

    @abstractmethod
    def behind_attention(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds what attention made of the layer's input, x, to the residual stream in place;
        returns what the next norm adds to it."""


class LayeredModel:
    """See `Model`."""

    config: ModelConfig
    embedding: Embedding
    layers: Sequence[Layer]
    final_norm: LastNorm
    lm_head: LMHead
    _platform: Platform

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
        for i in range(last + 1) if num_layers is None else self._some_layers(num_layers):
            layer = self.layers[i]
            if inputs is not None:
                inputs.take(i, residual)
            queries = layer.attention.queries(x, batch, kv_cache[i])
            if i == last and ends is not None:
                if not len(ends.tokens):
                    return residual[:0]
                queries = queries.index_select(0, ends.tokens)
                residual = residual.index_select(0, ends.tokens)
                attention_plan = ends.attention_plan
            x = layer.behind_attention(
                layer.attention.attend(queries, kv_cache[i], attention_plan), residual
            )
            x = (self.final_norm if i == last else self.layers[i + 1].input_norm).add(x, residual)
        # Nothing rounds what the last norm makes.
        assert isinstance(x, torch.Tensor)
        return x

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, self._platform.plan_attention(own, of_ends=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def _some_layers(self, num_layers: int) -> Iterable[int]:
        """Layers of a pass of fewer than there are, which launch what all launch, in their order;
        the last is one."""
        last = len(self.layers) - 1
        return [*range(min(num_layers - 1, last)), last]


def products_of(config: ModelConfig) -> dict[str, WeightSpec]:
    """Linear layers of a layer."""
    return {
        "qkv": joined_linear(config.qkv_sizes, config.hidden_size),
        "o": linear(config.hidden_size, config.num_heads * config.head_dim, split=Split.INPUTS),
        "gate_up": joined_linear(
            (config.intermediate_size, config.intermediate_size), config.hidden_size
        ),
        "down": linear(config.hidden_size, config.intermediate_size, split=Split.INPUTS),
    }


def layout_of(config: ModelConfig, layer: Mapping[str, WeightSpec]) -> Layout:
    """The layout of a model whose layers have these weights."""
    tied_to = "embed" if config.tie_word_embeddings else ""
    return {
        "embed": table(config.vocab_size, config.hidden_size, split=Split.VOCABULARY),
        "final_norm": norm(config.hidden_size),
        "lm_head": linear(
            config.vocab_size, config.hidden_size, tied_to=tied_to, split=Split.VOCABULARY
        ),
        **{
            f"layers.{i}.{name}": spec
            for i in range(config.num_layers)
            for name, spec in layer.items()
        },
    }
