"""Log probabilities in OpenAI's two formats, and prompt log probabilities in vLLM's. Pure
rendering."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from headwater.proto.common_pb2 import TokenLogprob, TopLogprob

from ..wire.token_scores import LOWEST, token_scores

_new_decoder = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(tokens: Iterable[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    return {"content": token_scores(tokens, as_ids=as_ids), "refusal": None}


class TextCounter:
    """Counts the characters of a text by token. A token that continues a character begins where
    that character does; a hidden token has no characters."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = _new_decoder("replace")

    def offsets(self, tokens: Iterable[TokenLogprob]) -> list[int]:
        """Number of characters before each of the next tokens."""
        return [self._add(b"" if token.hidden else token.chosen.token_bytes) for token in tokens]

    def prompt_offsets(self, tokens: Sequence[TokenLogprob], text: str) -> list[int]:
        """Like `offsets`, for all tokens of a prompt, counted from the end of its text: what a
        tokenizer puts before it, a token or a space, is not in it."""
        spelled = text.encode()
        behind = accumulate(
            (len(token.chosen.token_bytes) for token in reversed(tokens)), initial=0
        )
        ends = [max(0, len(spelled) - num_bytes) for num_bytes in behind][-2::-1]
        return [self._add(spelled[start:end]) for start, end in pairwise([0, *ends])]

    def _add(self, part: bytes) -> int:
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(part))
        return offset


def completion_logprobs(
    tokens: Sequence[TokenLogprob], offsets: list[int], *, as_ids: bool
) -> dict[str, list[Any]]:
    return {
        "text_offset": offsets,
        "token_logprobs": [max(token.chosen.logprob, LOWEST) for token in tokens],
        "tokens": [next(_names(token.chosen, as_ids)) for token in tokens],
        "top_logprobs": [_by_name(token, as_ids) for token in tokens],
    }


def _by_name(token: TokenLogprob, as_ids: bool) -> dict[str, float]:
    """Log probabilities of a token and of the likeliest alternatives, by name. Tokens with the same
    text have different names; the chosen token has the name under which it is listed."""
    ids: dict[str, int] = {}
    for entry in (token.chosen, *token.top):
        name = next(
            name
            for name in _names(entry, as_ids)
            if ids.get(name, entry.token_id) == entry.token_id
        )
        ids[name] = entry.token_id
    names = {token_id: name for name, token_id in ids.items()}
    return {
        names[entry.token_id]: max(entry.logprob, LOWEST) for entry in (*token.top, token.chosen)
    }


def _names(entry: TopLogprob, as_ids: bool) -> Iterator[str]:
    """Names that a token may have, best first. A token of incomplete characters is named by its
    bytes, as in OpenAI's API."""
    if not as_ids:
        if entry.token.encode() == entry.token_bytes:
            yield entry.token
        yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
    yield f"token_id:{entry.token_id}"


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
