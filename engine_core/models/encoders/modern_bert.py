"""The encoder of ModernBERT: norms before attention and MLP, rotary positions, gated MLPs, and
windows to both sides in most layers. Source: Warner et al., "Smarter, better, faster, longer",
2024."""

from __future__ import annotations

from typing import cast

import torch

from ...layers.linear.kinds import Weights
from ...layers.norm import LayerNorm, NoNorm
from ...layers.platform import EncoderPlatform, Platform
from ...layers.text_batch import TextBatch
from ...weights.layout import Layout, joined_linear, linear, table
from ...weights.model_config import ModelConfig
from ...weights.names import CheckpointNames
from ..layer_layout import norms_of
from .bert import DENSE, linear_names
from .both_ways import TextParts
from .encoder import DenseLayers, dense_layout
from .modern_bert_names import LAYER, MODEL, PREDICTIONS


class ModernLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the first layer has no norm of attention."""

    def __init__(self, parts: TextParts, i: int) -> None:
        prefix = f"layers.{i}."
        self._attention_norm = parts.norm(prefix + "attention_norm") if i else NoNorm()
        self._attention = parts.attention(i)
        self._mlp_norm = parts.norm(prefix + "mlp_norm")
        self._mlp = parts.mlp(i)

    def __call__(self, x: torch.Tensor, texts: object, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]; x is overwritten."""
        x += self._attention(self._attention_norm(x), texts, positions)
        x += self._mlp(self._mlp_norm(x))
        return x


class ModernBert:
    """See `Encoder`."""

    names = CheckpointNames(model=MODEL | DENSE, layer=LAYER, fused={}, ignored=PREDICTIONS)
    reads_page_groups = False

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        parts = TextParts(config, weights, platform, max_model_len)
        self.config = config
        self._embedding = parts.embedding()
        self._embedding_norm = cast(LayerNorm, parts.norm("embedding_norm"))
        self._layers = [ModernLayer(parts, i) for i in range(config.num_layers)]
        self._final_norm = cast(LayerNorm, parts.norm("final_norm"))
        encoding = cast(EncoderPlatform, platform)
        self.dense = DenseLayers(config, weights, encoding, self._embedding.dtype)

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        """Every weight of a model with this config."""
        hidden = config.hidden_size
        inner = config.intermediate_size
        layout = {
            "embed": table(config.vocab_size, hidden),
            **norms_of(config, ("embedding_norm", "final_norm")),
        }
        products = {
            "qkv": joined_linear(config.qkv_sizes, hidden),
            "o": linear(hidden, config.num_heads * config.head_dim),
            "gate_up": joined_linear((inner, inner), hidden),
            "down": linear(hidden, inner),
        }
        for i in range(config.num_layers):
            norms = ("attention_norm", "mlp_norm") if i else ("mlp_norm",)
            layer = products | norms_of(config, norms)
            layout |= {f"layers.{i}.{name}": spec for name, spec in layer.items()}
        return layout | dense_layout(config)

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """Hidden states [T, H]."""
        x = self._embedding_norm(self._embedding(batch.token_ids))
        for layer in self._layers:
            x = layer(x, batch.texts, batch.positions)
        return self._final_norm(x)


class ModernBertClassifier(ModernBert):
    """See `ModernBert`. A dense layer, its norm and the classifier follow the pooled state."""

    names = CheckpointNames(
        model={
            **MODEL,
            **linear_names("model.head.dense", "dense.0"),
            **linear_names("model.head.norm", "dense.0_norm"),
            **linear_names("model.classifier", "dense.1"),
        },
        layer=LAYER,
        fused={},
        ignored=(),
    )
