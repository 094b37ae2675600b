"""Similarity of two texts by vectors of their tokens. Source: Khattab and Zaharia, "ColBERT",
2020."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
