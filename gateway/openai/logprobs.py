"""Log probabilities in OpenAI's two formats, and prompt log probabilities in vLLM's. Pure rendering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headwater.proto.common_pb2 import TokenLogprob, TopLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_text(entry: TopLogprob, *, as_id: bool) -> str:
    return f"token_id:{entry.token_id}" if as_id else entry.token


def chat_logprobs(tokens: Iterable[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    return {
        "content": [
            {**_entry(token.chosen, as_ids), "top_logprobs": [_entry(top, as_ids) for top in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(entry: TopLogprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_text(entry, as_id=as_ids),
        "logprob": max(entry.logprob, LOWEST),
        "bytes": list(entry.token_bytes),
    }


def completion_logprobs(
    tokens: Sequence[TokenLogprob], *, offset: int, as_ids: bool
) -> tuple[dict[str, list[Any]], int]:
    """The lists, and the text offset (in characters) behind the last token."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.token)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(token.chosen.logprob, LOWEST) for token in tokens],
        "tokens": [token_text(token.chosen, as_id=as_ids) for token in tokens],
        "top_logprobs": [
            {token_text(entry, as_id=as_ids): max(entry.logprob, LOWEST) for entry in (*token.top, token.chosen)}
            for token in tokens
        ],
    }, offset


def prompt_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any] | None]:
    """One entry a prompt token, by token id; the first token has none."""
    return [None, *(_ranked(token) for token in tokens)]


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    ranks = {entry.token_id: rank for rank, entry in enumerate(token.top, 1)}
    return {
        str(entry.token_id): {
            "logprob": max(entry.logprob, LOWEST),
            "rank": ranks.get(entry.token_id),
            "decoded_token": entry.token,
        }
        for entry in (token.chosen, *token.top)
    }
