"""Fields of an encoder's config that decoders lack: embeddings, attention, and layers after the
pooled vector."""

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
    has_norm: bool = False
    """Whether a LayerNorm follows."""


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
    has_sparse: bool = False
    """Whether a layer makes a weight of each token."""
    has_colbert: bool = False
    """Whether a layer of its own makes the vectors of tokens."""
    label_pooling: str = "cls"
    """Pooling that a head of labels reads."""


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


def layers_of_tokens(sentence: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of `EncoderConfig` that say which layers for tokens the files have."""
    return {f"has_{kind}": bool((sentence or {}).get(kind)) for kind in ("sparse", "colbert")}


def longest_text(config: Mapping[str, Any], sentence: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config with the length of the longest text that sentence-transformers' files name, where
    that is less than its own."""
    asked = (sentence or {}).get("max_length")
    longest = config.get("max_position_embeddings")
    if not asked or type(longest) is not int:
        return {**config}
    return {**config, "max_position_embeddings": min(asked, longest)}
