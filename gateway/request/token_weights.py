"""Similarity of two texts by weights of their tokens. Source: Chen et al., "BGE M3-Embedding",
2024."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


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
