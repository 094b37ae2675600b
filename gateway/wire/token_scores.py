"""Log probabilities of tokens as OpenAI's chat has them, which Ollama's API has too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.proto.common_pb2 import TokenLogprob, TopLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_scores(tokens: Iterable[TokenLogprob], *, as_ids: bool) -> list[dict[str, Any]]:
    """An entry a token, with the likeliest tokens in its place."""
    return [
        {
            **_entry(token.chosen, as_ids),
            "top_logprobs": [_entry(top, as_ids) for top in token.top],
        }
        for token in tokens
    ]


def _entry(entry: TopLogprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{entry.token_id}" if as_ids else entry.token,
        "logprob": max(entry.logprob, LOWEST),
        "bytes": list(entry.token_bytes),
    }
