"""Pieces of a Lark grammar as text: literals, expressions, alternatives. Knows nothing of what they are for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from llguidance import regex_to_lark

from headwater.services.errors import BadRequest

ANY_TEXT = r"/(?s:.*)/"


def quoted(text: str) -> str:
    """As plain text, whatever tokens spell it."""
    return json.dumps(text, ensure_ascii=False)


def alternatives(texts: Iterable[str]) -> str:
    return " | ".join(map(quoted, texts))


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """The text, with tokens of its own for the special ones in it: these are no text to a grammar."""
    special = [token for token in special_tokens if token in text]
    if not special:
        return quoted(text)
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else quoted(piece) for piece in pieces if piece
    )


def expression(param: str, regex: str) -> str:
    """A regular expression over the whole of what it stands for, so that anchors at its ends say nothing."""
    if not regex:
        raise BadRequest.of(param, regex, "a regular expression that is not empty")
    bare = regex.removeprefix("^")
    if bare.endswith("$") and not bare.endswith("\\$"):
        bare = bare[:-1]
    return f"/{regex_to_lark(bare, '')}/"
