"""Fields of an encoder's config that a decoder's has not: those of its embeddings, of its attention
and of layers behind the pooled vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A linear layer behind the pooled vector."""

    in_features: int
    out_features: int
    has_bias: bool
    activation: str = ""
    """Name of an activation, as in `Platform.activation`; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    is_decoder: bool = False
    """Whether it has the layers of a decoder, whose tokens see each other both ways."""
    num_types: int = 0
    """Rows of a table of vectors of token types; 0: there is none."""
    num_buckets: int = 0
    """Buckets of distances between tokens, each with a bias of attention's scores; 0: none."""
    dense: tuple[DenseConfig, ...] = ()
    """Layers behind the pooled vector, in their order."""


def dense_of(sentence: Mapping[str, Any] | None) -> tuple[DenseConfig, ...]:
    """Dense layers that sentence-transformers' files name; see `sentence_files`."""
    return tuple(
        DenseConfig(
            in_features=layer["in_features"],
            out_features=layer["out_features"],
            has_bias=layer["bias"],
            activation=layer["activation"],
        )
        for layer in (sentence or {}).get("dense", ())
    )
