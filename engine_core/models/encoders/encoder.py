"""Encoders whose layers end with a norm: hidden states of whole texts, and dense layers behind a
pooled one. Source: Devlin et al., "BERT", 2019."""

from __future__ import annotations

from typing import ClassVar, cast

import torch

from ...layers.linear.kinds import Weights
from ...layers.linear.linear import Product
from ...layers.mixers.mutual_attention import distance_bias
from ...layers.norm import LayerNorm
from ...layers.platform import BiasedLinear, EncoderPlatform, Platform
from ...layers.text_batch import TextBatch
from ...weights.encoders.config import DenseConfig, EncoderConfig
from ...weights.layout import Layout, WeightSpec, bias, joined_bias, joined_linear, linear, table
from ...weights.model_config import ModelConfig
from ...weights.names import CheckpointNames
from ..layer_layout import norms_of
from ..parts import Parts


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(
        self, parts: Parts, weights: Weights, platform: EncoderPlatform, config: ModelConfig, i: int
    ) -> None:
        prefix = f"layers.{i}."

        def biased(name: str, activation: str = "") -> BiasedLinear:
            bias = weights.tensors[f"{prefix}{name}_bias"]
            return BiasedLinear(weights.linears[prefix + name], bias, activation)

        norms = [
            cast(LayerNorm, parts.norm(prefix + name)) for name in ("attention_norm", "output_norm")
        ]
        self._attention = platform.text_attention(biased("qkv"), config.head_dim)
        self._o = platform.sum_norm([biased("o")], norms[0])
        mlp = [biased("up", config.activation), biased("down")]
        self._mlp = platform.sum_norm(mlp, norms[1])

    def __call__(
        self, x: torch.Tensor, texts: object, distance_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, H] → [T, H]; x is overwritten."""
        x = self._o(self._attention(x, texts, distance_bias), x)
        return self._mlp(x, x)


class Encoder:
    """Texts in, hidden states out. Has no cache."""

    names: ClassVar[CheckpointNames]
    reads_page_groups = False

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        encoding = cast(EncoderPlatform, platform)
        parts = Parts(config, weights, platform, max_model_len)
        self.config = config
        self._platform = encoding
        self._embedding = parts.embedding()
        self._positions = weights.tensors["positions"][config.position_offset :]
        self._types = weights.tensors.get("types")
        self._embedding_norm = cast(LayerNorm, parts.norm("embedding_norm"))
        buckets = weights.tensors.get("distances")
        self._distance_bias = None if buckets is None else distance_bias(buckets, max_model_len)
        layers = range(config.num_layers)
        self._layers = [EncoderLayer(parts, weights, encoding, config, i) for i in layers]
        self.dense = DenseLayers(config, weights, encoding, self._embedding.dtype)

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        """Every weight of an encoder with this config."""
        encoder = encoder_of(config)
        hidden = config.hidden_size
        layout = {
            "embed": table(config.vocab_size, hidden),
            "positions": table(config.num_learned_positions, hidden),
        }
        if encoder.num_types:
            layout["types"] = table(encoder.num_types, hidden)
        if encoder.num_buckets:
            layout["distances"] = table(encoder.num_buckets, config.num_heads)
        layout |= norms_of(config, ("embedding_norm",))
        for i in range(config.num_layers):
            layout |= {f"layers.{i}.{name}": spec for name, spec in _layer_of(config).items()}
        return layout | dense_layout(config)

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """Hidden states [T, H]."""
        x = self._embedding(batch.token_ids)
        x += self._positions[batch.positions]
        if self._types is not None:
            x += self._types[0] if batch.types is None else self._types[batch.types]
        x = self._embedding_norm(x)
        for layer in self._layers:
            x = layer(x, batch.texts, self._distance_bias)
        return x


class DenseLayers:
    """Layers behind the pooling, in their order."""

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: EncoderPlatform, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._layers = [
            _normed_layer(config, weights, platform, dense, i)
            for i, dense in enumerate(encoder_of(config).dense)
        ]
        self._colbert = None
        if encoder_of(config).has_colbert:
            colbert = BiasedLinear(weights.linears["colbert"], weights.tensors["colbert_bias"])
            self._colbert = platform.biased_linear(colbert)
        self._sparse = weights.tensors.get("sparse")
        self._sparse_bias = weights.tensors.get("sparse_bias")

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """Vectors float32 [R, H] of texts → float32 [R, N]"""
        x = pooled
        for layer in self._layers:
            x = layer(x.to(self._dtype))
        return x.float()

    def token_vectors(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, H] of a text's tokens → float32 [T, N]"""
        return self(states) if self._colbert is None else self._colbert(states).float()

    def token_weights(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, H] of a text's tokens → weights float32 [T] of them, none below 0. Source:
        Chen et al., "BGE M3-Embedding", 2024."""
        assert self._sparse is not None
        assert self._sparse_bias is not None
        products = states.float() * self._sparse.float()
        return torch.relu(products.sum(1) + self._sparse_bias.float())


def dense_layout(config: ModelConfig) -> dict[str, WeightSpec]:
    """Weights of the layers behind the pooling."""
    layout = {}
    for i, dense in enumerate(encoder_of(config).dense):
        layout[f"dense.{i}"] = linear(dense.out_features, dense.in_features)
        if dense.has_bias:
            layout[f"dense.{i}_bias"] = bias(dense.out_features)
        if dense.has_norm:
            layout |= norms_of(config, (f"dense.{i}_norm",))
    if encoder_of(config).has_sparse:
        layout |= {"sparse": table(1, config.hidden_size), "sparse_bias": bias(1)}
    if encoder_of(config).has_colbert:
        hidden = config.hidden_size
        layout |= {"colbert": linear(hidden, hidden), "colbert_bias": bias(hidden)}
    return layout


def _normed_layer(
    config: ModelConfig,
    weights: Weights,
    platform: EncoderPlatform,
    dense: DenseConfig,
    i: int,
) -> Product:
    product = _dense_layer(weights, platform, dense, i)
    if not dense.has_norm:
        return product
    name = f"dense.{i}_norm"
    bias = weights.tensors.get(name + "_bias")
    norm = LayerNorm(weights.tensors[name], bias, config.rms_norm_eps)
    return lambda x: norm(product(x))


def _dense_layer(
    weights: Weights, platform: EncoderPlatform, dense: DenseConfig, i: int
) -> Product:
    layer = weights.linears[f"dense.{i}"]
    if dense.has_bias:
        bias = weights.tensors[f"dense.{i}_bias"]
        return platform.biased_linear(BiasedLinear(layer, bias, dense.activation))
    product = platform.linear(layer)
    if not dense.activation:
        return product
    return lambda x: platform.activation(product(x), dense.activation)


def _layer_of(config: ModelConfig) -> dict[str, WeightSpec]:
    hidden = config.hidden_size
    inner = config.intermediate_size
    return {
        "qkv": joined_linear(config.qkv_sizes, hidden),
        "qkv_bias": joined_bias(config.qkv_sizes),
        "o": linear(hidden, config.num_heads * config.head_dim),
        "o_bias": bias(hidden),
        "up": linear(inner, hidden),
        "up_bias": bias(inner),
        "down": linear(hidden, inner),
        "down_bias": bias(hidden),
        **norms_of(config, ("attention_norm", "output_norm")),
    }


def encoder_of(config: ModelConfig) -> EncoderConfig:
    assert config.encoder is not None
    return config.encoder
