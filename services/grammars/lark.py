"""Pieces of a Lark grammar as text: literals, expressions, alternatives. Knows nothing about their
use."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    RuleNode,
    RuleRefNode,
    resolve,
)

from ..runtime.errors import BadRequest
from .ascii_escapes import ascii_grammar, ascii_regex
from .endless_rules import endless_rule

ANY_TEXT = r"/(?s:.*)/"
_GBNF = re.compile(r"^[^\S\n]*+([A-Za-z][\w-]*)\s*::=", re.MULTILINE)
"""Pattern of a rule of GBNF, with its name. Lark may have the sign in its strings."""


def quoted(text: str) -> str:
    """Literal of plain text, whatever tokens spell it."""
    # NOTE: llguidance's reader of Lark takes no U+007F in a string, but its escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
    """Regular expression for a whole text, where anchors at its ends have no effect."""
    BadRequest.unless(regex, param, regex, "a regular expression that is not empty")
    if _ends_with_escape(regex):
        raise BadRequest.of(param, regex, "a regular expression whose last backslash has a letter")
    bare = regex.removeprefix("^")
    if bare.endswith("$") and not _ends_with_escape(bare[:-1]):
        bare = bare[:-1]
    return f"/{regex_to_lark(ascii_regex(bare), '')}/"


def _ends_with_escape(regex: str) -> bool:
    """Whether the expression ends with a backslash that is not escaped itself."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def grammar(param: str, text: str, special_tokens: Mapping[str, int]) -> str:
    """A grammar in Lark's syntax, or in that of GBNF, which is translated. Escapes of classes mean
    ASCII; special tokens are named by their ids."""
    BadRequest.unless(
        text.strip(),
        param,
        text,
        "a Lark grammar with a rule named start, or GBNF with one named root",
    )
    names: Mapping[str, str] = {}
    if _GBNF.search(text) is not None:
        text, names = _from_gbnf(param, text)
    refuse_endless_rule(param, text, names)
    return ascii_grammar(text, special_tokens)


def refuse_endless_rule(param: str, text: str, names: Mapping[str, str] = {}) -> None:
    """Raises `BadRequest` where a rule never ends. `names` are the client's, by those in the
    text."""
    if (name := endless_rule(text)) is not None:
        client_name = names.get(name, name)
        raise _invalid(f"{param} cannot be followed: its rule {client_name!r} never ends", param)


def _from_gbnf(param: str, text: str) -> tuple[str, dict[str, str]]:
    """The grammar in Lark's syntax, and the GBNF names of its rules by their new names."""
    counts = Counter(_GBNF.findall(text))
    if twice := next((name for name, count in counts.items() if count > 1), ""):
        raise _invalid(f"{param} has two rules named {twice!r}", param)
    try:
        rules = GrammarParser().parse(text)
        named = {name for rule in rules.values() for name in _named(rule)}
        if not (missing := {"root", *named} - rules.keys()):
            return _as_lark(rules)
    except GbnfToLarkError as fault:
        rest = text[fault.pos.pos :][:40]
        where = f"from {rest!r} on" if rest.strip() else "to its end"
        raise _invalid(f"{param} is no GBNF: it cannot be read {where}", param) from None
    except RecursionError:
        raise _invalid(f"{param} is no GBNF: it is nested too deeply", param) from None
    except (ValueError, OverflowError):
        raise _invalid(f"{param} is no GBNF: an escape or a count is too large", param) from None
    raise _invalid(f"{param} has no rule named {min(missing)!r}", param)


def _as_lark(rules: dict[str, RuleNode]) -> tuple[str, dict[str, str]]:
    """The rules in Lark's syntax, under new names: the translation joins names that differ in case
    or hyphens, and takes the name `start` for the root."""
    names = {name: f"rule{i}" for i, name in enumerate(rules)} | {"root": "root"}
    for rule in rules.values():
        _rename(rule, names)
    renamed = {rule.name: rule for rule in rules.values()}
    resolve(renamed)
    in_order = sorted(renamed.values(), key=lambda rule: rule.order)
    text = "\n".join(map(str, in_order))
    return text, {new: name for name, new in names.items()} | {"start": "root"}


def _rename(node: ASTNode, names: Mapping[str, str]) -> None:
    if isinstance(node, RuleNode | RuleRefNode):
        node.name = names[node.name]
    for child in node.children():
        _rename(child, names)


def _invalid(message: str, param: str) -> BadRequest:
    return BadRequest(param, message, code="invalid_grammar")


def _named(node: ASTNode) -> Iterator[str]:
    """Names of rules in a rule."""
    if isinstance(node, RuleRefNode):
        yield node.name
    for child in node.children():
        yield from _named(child)
