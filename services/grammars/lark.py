"""Pieces of a Lark grammar as text: literals, expressions, alternatives. Knows nothing about their
use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    RuleRefNode,
    gbnf_to_lark,
)

from ..runtime.errors import BadRequest
from .ascii_escapes import ascii_grammar, ascii_regex

ANY_TEXT = r"/(?s:.*)/"
_GBNF = re.compile(r"^[^\S\n]*+[A-Za-z][\w-]*\s*::=", re.MULTILINE)
"""Pattern of a rule of GBNF. Lark may have the sign in its strings."""


def quoted(text: str) -> str:
    """Literal of plain text, whatever tokens spell it."""
    return json.dumps(text, ensure_ascii=False)


def alternatives(texts: Iterable[str]) -> str:
    return " | ".join(map(quoted, texts))


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Literal of a text, with the special tokens in it as tokens: they are no text to a grammar."""
    special = [token for token in special_tokens if token in text]
    if not special:
        return quoted(text)
    longest_first = sorted(map(re.escape, special), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else quoted(piece)
        for piece in pieces
        if piece
    )


def expression(param: str, regex: str) -> str:
    """Regular expression for a whole text, so that anchors at its ends have no effect."""
    BadRequest.unless(regex, param, regex, "a regular expression that is not empty")
    bare = regex.removeprefix("^")
    if bare.endswith("$") and not bare.endswith("\\$"):
        bare = bare[:-1]
    return f"/{regex_to_lark(ascii_regex(bare), '')}/"


def grammar(param: str, text: str) -> str:
    """A grammar in Lark's syntax, or in that of GBNF, which is translated. Escapes of classes mean
    ASCII."""
    BadRequest.unless(
        text.strip(),
        param,
        text,
        "a Lark grammar with a rule named start, or GBNF with one named root",
    )
    return ascii_grammar(_from_gbnf(param, text) if _GBNF.search(text) is not None else text)


def _from_gbnf(param: str, text: str) -> str:
    try:
        rules = GrammarParser().parse(text)
        missing = {
            "root",
            *(name for rule in rules.values() for name in _named(rule)),
        } - rules.keys()
        if not missing:
            return gbnf_to_lark(text)
    except (GbnfToLarkError, ValueError, OverflowError, RecursionError) as fault:
        raise BadRequest(
            param, f"{param} is no GBNF: {str(fault)[:200]}", code="invalid_grammar"
        ) from None
    raise BadRequest(param, f"{param} has no rule named {min(missing)!r}", code="invalid_grammar")


def _named(node: ASTNode) -> Iterator[str]:
    """Names of rules in a rule."""
    if isinstance(node, RuleRefNode):
        yield node.name
    for child in node.children():
        yield from _named(child)
