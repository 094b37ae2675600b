"""Converts a Lark grammar of texts to the grammar of the same texts in JSON strings, without the
quotes.

Every character has one spelling: quotes, backslashes and control characters are escaped, others
stand for themselves. The characters of a class are found by llguidance, which reads the grammar in
the end.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..runtime.errors import BadRequest

ESCAPED = tuple(map(chr, [*range(0x20), ord('"'), ord("\\")]))
_PLAIN = r'[^"\\\x00-\x1f]'
_TOKEN = re.compile(
    r"""(?P<space>\s+|(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*(?:"i?)?)(?P<range>\s*\.\.\s*"(?:\\.|[^"\\\n])*")?
    |/(?P<regex>(?:\\.|[^/\\])+)(?:/(?P<flags>[imslux]*)|\\?\Z)
    |%import\s+common\s*(?:\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<names>[^()]*)\))
    |(?P<other>%(?:ignore|lark)\b|<(?P<special>[^<>\s]+)>|[%@](?P<beyond>\w*)|\w+|.)""",
    re.VERBOSE | re.DOTALL,
)
"""A token of a grammar. A string or an expression without an end is a token too, since searching
for its end from every position takes quadratic time; parsing it is an error."""
_MATCHER = re.compile(
    r"""(?P<opening>\((?:\?(?:P?<\w+>|[a-zA-Z-]*[:)]))?)
    |(?P<count>\{\d*,?\d*\}|[*+?|)^$]|\\[bBAzG])
    |(?P<one>\.|\\(?:[pPuUx]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[pP].|.)|\[|[^\\\[])""",
    re.VERBOSE | re.DOTALL,
)
_COMMON = {
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
    "C_COMMENT": r"/\/\*(?s:.)*?\*\//",
}
"""Lark's common terminals that may match characters which are escaped."""
MAX_CLASS_CHARS = 2048
CLASSES_AT_ONCE = 64
"""Number of classes that one grammar reads."""


class _Class(NamedTuple):
    """A class of characters in a regular expression."""

    text: str
    """Source of the class, with its brackets."""
    ignores_case: bool

    @property
    def expression(self) -> str:
        return f"/{self.text}/{'i' * self.ignores_case}"


def quoted_grammar(param: str, grammar: str) -> str:
    """Grammar of the texts in JSON strings. Raises `BadRequest`, naming `param`, for a grammar that
    matches no text."""
    return "".join(_within_strings(param, _tokens(param, grammar)))


def quoted_regex(param: str, regex: str, flags: str = "") -> str:
    """A regular expression, rewritten character by character."""
    parts = list(_matchers(param, regex, flags))
    classes = list(dict.fromkeys(part for part in parts if isinstance(part, _Class)))
    escaped = _escaped_of(param, classes)
    return "".join(
        _spelled(part, escaped[part]) if isinstance(part, _Class) else part for part in parts
    )


def _within_strings(param: str, tokens: Iterator[str]) -> Iterator[str]:
    """Restricts `~` to the characters of JSON strings."""
    depth = 0
    ends = list[int]()
    other = f"(/{quoted_regex(param, '(?s:.)*')}/ & ~"
    for token in tokens:
        if token == "~":
            ends.append(depth)
            yield other
            continue
        yield token
        depth += (token == "(") - (token == ")")
        while ends and ends[-1] == depth and not token.isspace():
            ends.pop()
            yield ")"


def _tokens(param: str, grammar: str) -> Iterator[str]:
    for found in _TOKEN.finditer(grammar):
        kind = found.lastgroup
        if found["space"] is not None:
            yield "\n" if "\n" in found["space"] else " "
        elif found["range"] is not None:
            first, last = (
                _read(param, part) for part in re.split(r"(?<=\")\s*\.\.\s*(?=\")", found.group())
            )
            yield f"/{quoted_regex(param, f'[{_code_point(first)}-{_code_point(last)}]')}/"
        elif found["string"] is not None:
            yield _string(param, found["string"])
        elif found["regex"] is not None:
            if found["flags"] is None:
                raise _refusal(
                    param, f"has {found.group()[:20]!r}, a regular expression without its end"
                )
            yield f"/{quoted_regex(param, found['regex'], found['flags'])}/{found['flags']}"
        elif found["name"] is not None:
            yield from _imported(param, found["name"], found["alias"] or found["name"])
        elif found["names"] is not None:
            for name in filter(None, re.split(r"[\s,]+", found["names"])):
                yield from _imported(param, name, name)
        elif found["special"] is not None or found["beyond"] is not None:
            what = found.group().split()[0]
            raise _refusal(
                param,
                f"uses {what!r}; allowed: Lark of text, without tokens, JSON and other grammars",
            )
        else:
            assert kind is not None
            yield found.group()


def _imported(param: str, name: str, alias: str) -> Iterator[str]:
    if name in _COMMON:
        yield f"\n{alias}: {quoted_grammar(param, _COMMON[name])}\n"
    else:
        yield f"\n%import common.{name} -> {alias}\n"


def _string(param: str, literal: str) -> str:
    """Grammar of a string. Letters of escapes have one case, also where the text is
    case-insensitive."""
    ignores_case = literal.endswith("i")
    text = _read(param, literal.removesuffix("i"))
    if not ignores_case:
        return json.dumps(_quoted(text), ensure_ascii=False)
    pieces = [piece for piece in re.split(r'(["\\\x00-\x1f]+)', text) if piece]
    spelled = [
        json.dumps(_quoted(piece), ensure_ascii=False) + ("" if piece[0] in ESCAPED else "i")
        for piece in pieces
    ]
    return f"({' '.join(spelled)})" if len(spelled) > 1 else (spelled or ['""'])[0]


def _read(param: str, literal: str) -> str:
    """Text of a Lark string, which is a JSON string with \\x besides."""
    try:
        text: str = json.loads(
            re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", literal.replace("\t", "\\t"))
        )
        # Raises UnicodeEncodeError, a ValueError, for half a surrogate pair.
        text.encode()
    except ValueError:
        raise _refusal(
            param,
            f"has the string {literal[:40]}, which cannot be read; allowed: JSON's escapes and \\x",
        ) from None
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _code_point(char: str) -> str:
    return f"\\u{{{ord(char):x}}}" if len(char) == 1 else char


def _matchers(param: str, regex: str, flags: str) -> Iterator[str | _Class]:
    """Parts of an expression: matchers of single characters that may be escaped, and the rest as it
    stands."""
    at = 0
    scopes = [flags]
    if "x" in flags:
        raise _refusal(param, "has a regular expression with the flag x; allowed: i, m, s and u")
    while at < len(regex):
        found = _MATCHER.match(regex, at)
        if found is None:
            raise _refusal(
                param, f"has {regex[at:][:20]!r} in a regular expression, which cannot be read"
            )
        at = found.end()
        text = found.group()
        if found["opening"] is not None:
            scopes.append(_scoped(param, scopes[-1], text))
            if text.endswith(")"):
                # `(?i)` applies to the rest of the group around it.
                scopes[-2:] = [scopes[-1]]
        elif text == ")" and len(scopes) > 1:
            scopes.pop()
        elif found["one"] is not None:
            if text == "[":
                at = _class_end(param, regex, found.start())
                text = regex[found.start() : at]
            yield _as_class(param, text, scopes[-1])
            continue
        yield text


def _scoped(param: str, flags: str, opening: str) -> str:
    """Flags inside a group, as `(?i-s:` turns them on and off."""
    found = re.fullmatch(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?[:)]", opening)
    if found is None:
        return flags
    if "x" in found[1]:
        raise _refusal(param, "has a regular expression with the flag x; allowed: i, m, s and u")
    return "".join(sorted({*flags, *found[1]} - {*(found[2] or "")}))


def _class_end(param: str, regex: str, start: int) -> int:
    """Position behind a class. Classes may stand in classes; a bracket right behind an opening one
    is a letter."""
    depth = 0
    at = start
    while at < len(regex):
        if regex[at] == "\\":
            at += 1
        elif (
            regex[at] == "["
            and (named := re.compile(r"\[:\^?\w+:\]").match(regex, at)) is not None
            and depth
        ):
            at = named.end() - 1
        elif regex[at] == "[":
            depth += 1
            at += (regex[at + 1 : at + 2] == "^") + (regex[at + 1 :].removeprefix("^")[:1] == "]")
        elif regex[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise _refusal(
        param, f"has {regex[start:][:20]!r} in a regular expression, a class without its end"
    )


def _as_class(param: str, one: str, flags: str) -> str | _Class:
    """A matcher of a single character: a letter as it stands, or a class."""
    if len(one) == 1 and one != "." and one not in ESCAPED:
        return one
    if one == ".":
        one = r"[\s\S]" if "s" in flags else r"[^\n]"
    elif not one.startswith("["):
        one = f"[{one}]"
    if len(one) > MAX_CLASS_CHARS:
        raise _refusal(param, f"has a class of {len(one)} characters; allowed: {MAX_CLASS_CHARS}")
    return _Class(one, "i" in flags)


def _spelled(of_class: _Class, escaped: Sequence[str]) -> str:
    """Pattern of the spellings of a class that matches these characters with an escape."""
    if not escaped:
        return of_class.text
    spelled = [_quoted(char) for char in escaped]
    letters = "".join(re.escape(each[1]) for each in spelled if len(each) == 2)
    codes = "|".join(each[-2:] for each in spelled if len(each) > 2)
    ways = [rf"\\[{letters}]"] * bool(letters) + [rf"\\u00(?:{codes})"] * bool(codes)
    # The spelling of an escape does not depend on case.
    exact = f"(?-i:{'|'.join(ways)})" if of_class.ignores_case else "|".join(ways)
    return f"(?:[{of_class.text}&&{_PLAIN}]|{exact})"


def _escaped_of(param: str, classes: Sequence[_Class]) -> dict[_Class, list[str]]:
    """Characters with an escape that each class matches. NOTE: not remembered: a tenant would learn
    from the time of an expression what classes others use."""
    found: dict[_Class, list[str]] = {}
    for start in range(0, len(classes), CLASSES_AT_ONCE):
        some = classes[start : start + CLASSES_AT_ONCE]
        found |= _matched(some) or {each: _matched_alone(param, each) for each in some}
    return found


def _matched_alone(param: str, one: _Class) -> list[str]:
    """Raises `BadRequest` for a class that cannot be read."""
    matcher = _matcher(f"start: {one.expression}")
    if matcher.is_error():
        raise _refusal(param, f"has {one.text!r} in a regular expression, which cannot be read")
    return _allowed(matcher)


def _matched(classes: Sequence[_Class]) -> dict[_Class, list[str]] | None:
    """Like `_matched_alone`, for several classes; None where one cannot be read or matches nothing.
    Each stands after its number in one grammar, since a grammar costs ten times as much as a class
    in it: 0.7 and 0.07 ms (2026-11-29)."""
    numbers = [f"{i:03}" for i in range(len(classes))]
    start = " | ".join(f"T{number}" for number in numbers)
    rules = [
        f"T{number}: /{number}/ {each.expression}"
        for number, each in zip(numbers, classes, strict=True)
    ]
    matcher = _matcher("\n".join((f"start: {start}", *rules)))
    found = {}
    for number, each in zip(numbers, classes, strict=True):
        if matcher.is_error() or not matcher.consume_tokens(list(number.encode())):
            return None
        found[each] = _allowed(matcher)
        matcher.rollback(len(number))
    return found


def _matcher(text: str) -> LLMatcher:
    grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    return LLMatcher(_bytes(), grammar, log_level=0)


def _allowed(matcher: LLMatcher) -> list[str]:
    """Characters with an escape that may come next."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(mask, bitorder="little")
    return [char for char in ESCAPED if allowed[ord(char)]]


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _refusal(param: str, what: str) -> BadRequest:
    return BadRequest(param, f"{param} {what}", code="invalid_grammar")
