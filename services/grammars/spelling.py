"""Checks that a model's tokens can write a client's text at all: vocabularies that were learned from
text may lack bytes, such as those of unassigned characters."""

from __future__ import annotations

from ..runtime.errors import BadRequest


def check_spelling(param: str, text: str, missing: frozenset[int]) -> None:
    """Raises `BadRequest` naming the first character of the text that has one of the missing
    bytes in UTF-8."""
    spelled = text.encode()
    if len(spelled.translate(None, bytes(missing))) == len(spelled):
        return
    char = next(each for each in text if not missing.isdisjoint(each.encode()))
    raise BadRequest(
        param,
        f"{param} has the character U+{ord(char):04X}, which no tokens of the model spell",
        code="invalid_grammar",
    )
