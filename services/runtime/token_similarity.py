"""Similarity of two texts by vectors or weights of their tokens. Sources: Khattab and Zaharia,
"ColBERT", 2020; Chen et al., "BGE M3-Embedding", 2024."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


def token_vectors(
    values: Sequence[float], token_ids: Sequence[int], uncounted: Iterable[int]
) -> Vectors:
    """Values of all tokens, one token after another → [tokens that count, N], each of length 1."""
    vectors = np.array(values, np.float32).reshape(len(token_ids), -1)
    counted = vectors[~np.isin(token_ids, list(uncounted))]
    lengths = np.linalg.norm(counted, axis=1, keepdims=True)
    scaled: Vectors = counted / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled


def max_similarity(query: Vectors, document: Vectors) -> float:
    """Sum over the query's tokens of the largest cosine with a token of the document."""
    if not len(document):
        return 0.0
    return float((query @ document.T).max(1).sum())


def token_weights(
    values: Sequence[float], token_ids: Sequence[int], uncounted: Iterable[int]
) -> dict[int, float]:
    """The largest weight of each token id that counts and has one, by id."""
    left_out = set(uncounted)
    weights: dict[int, float] = {}
    for token_id, weight in zip(token_ids, values, strict=True):
        if weight > 0 and token_id not in left_out:
            weights[token_id] = max(weight, weights.get(token_id, 0.0))
    return weights


def lexical_similarity(query: Mapping[int, float], document: Mapping[int, float]) -> float:
    """Sum of the products of the weights of shared tokens."""
    return sum(weight * document.get(token_id, 0.0) for token_id, weight in query.items())
