"""Checks that a model's tokens can write a client's text at all: vocabularies that were learned
from text may lack bytes, such as those of unassigned characters."""

from __future__ import annotations

from ..runtime.errors import BadRequest


def check_spelling(param: str, text: str, missing: frozenset[int]) -> None:
    """Raises `BadRequest` that names the first character of the text whose UTF-8 needs a byte
    outside of the vocabulary."""
    spelled = text.encode()
    if len(spelled.translate(None, bytes(missing))) == len(spelled):
        return
    char = next(each for each in text if not missing.isdisjoint(each.encode()))
    raise BadRequest(
        param,
        f"{param} has the character U+{ord(char):04X}, which no tokens of the model spell",
        code="invalid_grammar",
    )
