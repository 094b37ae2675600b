"""Vectors that each layer adds for a token, made of its id and of its embedding. Source: Gemma 3n
and Gemma 4, "per-layer inputs"."""

from __future__ import annotations

import torch

from .embedding import Embedding
from .linear.linear import Linear
from .norm import LayerNorm, RMSNorm
from .platform import Platform


class LayerVectors:
    """The vectors of one pass at a time."""

    def __init__(
        self,
        platform: Platform,
        table: Embedding,
        projection: Linear,
        norm: RMSNorm | LayerNorm,
        num_layers: int,
    ) -> None:
        """table [V, L P]; projection [L P, H]; norm [P]"""
        self._table = table
        self._project = platform.linear(projection)
        self._scale = projection.in_features**-0.5
        self._norm = norm
        self._num_layers = num_layers
        self._vectors: torch.Tensor | None = None

    def begin(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> None:
        """Begins a pass over tokens, int64 [T], with embeddings [T, H]."""
        num_tokens = len(token_ids)
        projected = (self._project(embedded) * self._scale).view(num_tokens * self._num_layers, -1)
        named = self._table(token_ids).view(num_tokens * self._num_layers, -1)
        vectors = (self._norm(projected) + named) * 2**-0.5
        self._vectors = vectors.view(num_tokens, self._num_layers, -1)

    def keep(self, tokens: torch.Tensor) -> None:
        """Drops the vectors of all tokens of the pass but these, int64 [T], and puts them in their
        order."""
        assert self._vectors is not None
        self._vectors = self._vectors.index_select(0, tokens)

    def of(self, layer: int) -> torch.Tensor:
        """[T, P]"""
        assert self._vectors is not None
        return self._vectors[:, layer]


class NoVectors:
    """See `LayerVectors`: layers have none."""

    def begin(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> None:
        pass

    def keep(self, tokens: torch.Tensor) -> None:
        pass


class LayerVector:
    """norm(projection(activation(gate(x)) * vector)) of one layer."""

    def __init__(
        self,
        platform: Platform,
        vectors: LayerVectors,
        layer: int,
        gate: Linear,
        projection: Linear,
        norm: RMSNorm | LayerNorm,
        activation: str,
    ) -> None:
        """gate [P, H]; projection [H, P]; norm [H]; activation as in `Platform.activation`."""
        self._platform = platform
        self._vectors = vectors
        self._layer = layer
        self._gate = platform.linear(gate)
        self._project = platform.linear(projection)
        self._norm = norm
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]"""
        gates = self._platform.activation(self._gate(x), self._activation)
        return self._norm(self._project(gates * self._vectors.of(self._layer)))
