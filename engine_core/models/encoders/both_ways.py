"""Decoders whose tokens see each other both ways: layers of a decoder, attention of an encoder.
EmbeddingGemma and GTE-Qwen2 are such models."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from ...layers.linear.kinds import Weights
from ...layers.mixers.both_ways import BothWaysAttention
from ...layers.platform import EncoderPlatform, Platform
from ...layers.text_batch import TextBatch
from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from ..decoder import Decoder
from ..gemma3 import Gemma3
from ..layered import LayeredModel
from ..parts import Parts
from .bert import DENSE
from .encoder import DenseLayers, dense_layout


class TextParts(Parts):
    """See `Parts`."""

    def attention(self, i: int) -> BothWaysAttention:  # type: ignore[override]  # of no cache
        config = self._config
        prefix = f"layers.{i}."
        norms = [self.factors(prefix + name) for name in ("q_norm", "k_norm") if config.qk_norm]
        q_norm, k_norm = norms or (None, None)
        return BothWaysAttention(
            cast(EncoderPlatform, self._platform),
            self._weights.linears[prefix + "qkv"],
            self.linear(prefix + "o"),
            self._table_of(i),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            qkv_bias=self._weights.tensors.get(prefix + "qkv_bias"),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            window=config.window_of(i),
            max_len=self._max_model_len,
        )


class BothWays(LayeredModel):
    """Texts in, hidden states out; see `Encoder`."""

    reads_page_groups = False

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        parts = TextParts(config, weights, platform, max_model_len)
        self.config = config
        self._encoding = cast(EncoderPlatform, platform)
        self.embedding = parts.embedding()
        self.dtype = self.embedding.dtype
        self.layers = [self._layer(parts, i) for i in range(config.num_layers)]
        self.final_norm = self._final_norm(parts)
        self.dense = DenseLayers(config, weights, self._encoding, self.dtype)

    @classmethod
    def layout(cls, config: ModelConfig) -> Layout:
        return {**super().layout(config), **dense_layout(config)}

    def forward(self, batch: TextBatch) -> torch.Tensor:  # type: ignore[override]  # of no cache
        """Hidden states [T, H]."""
        residual = self.embedding(batch.token_ids)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        x = self.layers[0].input_norm(residual)
        for layer, norm in zip(self.layers, norms, strict=True):
            attention = cast(BothWaysAttention, layer.attention)
            x = layer.behind_attention(attention(x, batch.texts, batch.positions), residual)
            x = norm.add(x, residual)
        assert isinstance(x, torch.Tensor)
        return x


class BothWaysDecoder(BothWays, Decoder):
    """See `BothWays`."""

    names = replace(Decoder.names, model={**Decoder.names.model, **DENSE})


class BothWaysGemma3(BothWays, Gemma3):
    """See `BothWays`."""

    names = replace(Gemma3.names, model={**Gemma3.names.model, **DENSE})
