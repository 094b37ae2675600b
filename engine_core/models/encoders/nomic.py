"""The encoder of NomicBERT: BERT's order of norms, rotary positions and gated MLPs. Source:
Nussbaum et al., "Nomic Embed: training a reproducible long context text embedder", 2024."""

from __future__ import annotations

from typing import cast

import torch

from ...layers.linear.kinds import Weights
from ...layers.norm import LayerNorm
from ...layers.platform import EncoderPlatform, Platform
from ...layers.text_batch import TextBatch
from ...weights.layout import Layout, joined_linear, linear, table
from ...weights.model_config import ModelConfig
from ..layer_layout import norms_of
from .both_ways import TextParts
from .encoder import DenseLayers, dense_layout, encoder_of
from .nomic_names import NAMES

NORMS = ("attention_norm", "output_norm")


class NomicLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, parts: TextParts, i: int) -> None:
        prefix = f"layers.{i}."
        self._attention = parts.attention(i)
        self._mlp = parts.mlp(i)
        self._attention_norm, self._output_norm = (
            cast(LayerNorm, parts.norm(prefix + name)) for name in NORMS
        )

    def __call__(self, x: torch.Tensor, texts: object, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]; x is overwritten."""
        x = self._attention_norm.add(self._attention(x, texts, positions), x)
        return self._output_norm.add(self._mlp(x), x)


class NomicBert:
    """See `Encoder`."""

    names = NAMES
    reads_page_groups = False

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        parts = TextParts(config, weights, platform, max_model_len)
        self.config = config
        self._platform = cast(EncoderPlatform, platform)
        self._embedding = parts.embedding()
        self._types = weights.tensors["types"]
        self._embedding_norm = cast(LayerNorm, parts.norm("embedding_norm"))
        self._layers = [NomicLayer(parts, i) for i in range(config.num_layers)]
        self.dense = DenseLayers(config, weights, self._platform, self._embedding.dtype)

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        """Every weight of a model with this config."""
        hidden = config.hidden_size
        inner = config.intermediate_size
        layout = {
            "embed": table(config.vocab_size, hidden),
            "types": table(encoder_of(config).num_types, hidden),
            **norms_of(config, ("embedding_norm",)),
        }
        layer = {
            "qkv": joined_linear(config.qkv_sizes, hidden),
            "o": linear(hidden, config.num_heads * config.head_dim),
            "gate_up": joined_linear((inner, inner), hidden),
            "down": linear(hidden, inner),
            **norms_of(config, NORMS),
        }
        for i in range(config.num_layers):
            layout |= {f"layers.{i}.{name}": spec for name, spec in layer.items()}
        return layout | dense_layout(config)

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """Hidden states [T, H]."""
        x = self._embedding(batch.token_ids)
        x += self._types[0] if batch.types is None else self._types[batch.types]
        x = self._embedding_norm(x)
        for layer in self._layers:
            x = layer(x, batch.texts, batch.positions)
        return x
