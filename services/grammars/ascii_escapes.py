r"""Makes \d, \w, \s and their opposites mean ASCII in regular expressions of clients, and names the
special tokens of their grammars by ids.

To llguidance, as to Rust, they are Unicode's: \d matches the digits of every script. Those of JSON
Schema's `pattern` are ASCII already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\x0C\r\x20"}
_ONE = r"\\.|[^\\]"
_OUTSIDE = re.compile(rf"(?P<opening>\[\^?(?:-+|\])?)|{_ONE}", re.DOTALL)
"""A matcher, or the beginning of a class, in which leading hyphens, or else a leading bracket,
stand for themselves."""
_INSIDE = re.compile(
    rf"\[:\^?\w+:\]|(?P<opening>\[\^?(?:-+|\])?)|(?P<closing>\])|&&|--|~~|(?P<range>(?:{_ONE})-(?:\\.|[^\\\]-]))|{_ONE}",
    re.DOTALL,
)
_LARK = re.compile(
    r"""(?:\#|//)[^\n]*
    |"(?:\\.|[^"\\\n])*"?
    |/(?P<regex>(?:\\.|[^/\\])+)/
    |/(?:\\.|[^/\\])*
    |<[^<>\s]+>|[^\#/"<]+|.""",
    re.VERBOSE | re.DOTALL,
)
"""A comment, a string, a regular expression, a special token (`</s>`) or what is between them. An
expression without its end takes all the rest, so that reading takes linear time."""


def ascii_regex(regex: str) -> str:
    return "".join(_rewritten(regex))


def ascii_grammar(lark: str, special_tokens: Mapping[str, int]) -> str:
    """A grammar in Lark's syntax with its regular expressions rewritten, and ids in place of the
    names of special tokens."""
    return "".join(_in_ascii(found, special_tokens) for found in _LARK.finditer(lark))


def _in_ascii(found: re.Match[str], special_tokens: Mapping[str, int]) -> str:
    text = found.group()
    if found["regex"] is not None:
        return f"/{ascii_regex(found['regex'])}/"
    return f"<[{special_tokens[text]}]>" if text in special_tokens else text


def _rewritten(regex: str) -> Iterator[str]:
    """Pieces of the rewritten expression. Classes may be nested, so an escape becomes a class in
    either place."""
    at = depth = 0
    while (found := (_INSIDE if depth else _OUTSIDE).match(regex, at)) is not None:
        at = found.end()
        text = found.group()
        groups = found.groupdict()
        if groups["opening"] is not None:
            depth += 1
        elif groups.get("closing") is not None:
            depth -= 1
        # An escape that is an end of a range is an error that llguidance names.
        yield text if groups.get("range") is not None else _piece(text, is_in_class=depth > 0)
    # A backslash at the end is an error too.
    yield regex[at:]


def _piece(text: str, *, is_in_class: bool) -> str:
    letters = _ASCII.get(text[1:].lower()) if text.startswith("\\") else None
    if letters is None:
        return text
    piece = f"[{'^' if text[1].isupper() else ''}{letters}]"
    # The flag i adds the Kelvin sign and the long s to letters. NOTE: inside a class nothing can
    # keep them out.
    return piece if is_in_class or text[1] not in "wW" else f"(?-i:{piece})"
