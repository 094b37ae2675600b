"""Finds rules of a Lark grammar that never end, as one does that needs itself in each alternative.

Reads the common syntax of rules only. What it does not know, it takes for text that ends.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from .endless import least_fixed_point

_TOKEN = re.compile(
    r"""(?P<skip>\s+|(?:\#|//)[^\n]*|%(?:import|declare|llguidance)[^\n]*|->\s*\w+)
    |(?P<rule>[?!]{0,2}(?P<name>[a-z_]\w*+)(?P<options>\[[^\]\n"]{0,200}\])?(?:\.-?\d+)?[ \t]*:(?!:))
    |(?P<terminal>[A-Z]\w*+(?:\[[^\]\n"]{0,200}\])?(?:\.-?\d+)?[ \t]*:(?!:)|%ignore\b)
    |(?P<json>%(?:json|regex)\s*(?=\{))
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>|[A-Z]\w*|@[\w-]+|\.\.)
    |(?P<named>[a-z_]\w*)(?!::|\s*\{\s*[a-z_"])
    |(?P<count>~\s*(?P<times>\d+)(?:\s*\.\.\s*\d+)?|\{\s*(?P<least>\d*)\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[()\[\]|*+?])""",
    re.VERBOSE | re.DOTALL,
)


class _NotRead(Exception):
    """Raised for syntax beyond the common one."""


class _Item(NamedTuple):
    """A rule, or a group in one, as part of an alternative."""

    name: str
    is_optional: bool


Rules = dict[str, list[list[_Item]]]
"""Alternatives of each rule and group, without the text in them."""


def endless_rule(grammar: str) -> str | None:
    """A rule that an answer may come to and that never ends; None where there is none."""
    try:
        rules = _Reader(grammar).rules()
    except (_NotRead, ValueError):
        return None
    ways = {
        name: [
            frozenset(each.name for each in items if not each.is_optional and each.name in rules)
            for items in alternatives
        ]
        for name, alternatives in rules.items()
    }
    ending = least_fixed_point(ways)
    return next((name for name in _reached(rules) if name[0] != "(" and name not in ending), None)


def _reached(rules: Rules) -> list[str]:
    """Rules and groups that the rule `start` leads to."""
    found = dict.fromkeys(["start"] if "start" in rules else [])
    waiting = list(found)
    while waiting:
        for items in rules[waiting.pop()]:
            for each in items:
                if each.name in rules and each.name not in found:
                    found[each.name] = None
                    waiting.append(each.name)
    return list(found)


class _Reader:
    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._rules: Rules = {}
        self._open: list[tuple[str, str]] = []
        """Rule and groups that are being read, each with the sign that closes it."""

    def rules(self) -> Rules:
        """Raises `_NotRead`, and `ValueError` for JSON that is none."""
        at = 0
        while at < len(self._grammar):
            found = _TOKEN.match(self._grammar, at)
            if found is None:
                raise _NotRead
            at = found.end()
            if found.lastgroup == "json":
                _, at = json.JSONDecoder().raw_decode(self._grammar, at)
            self._take(found)
        if len(self._open) > 1:
            raise _NotRead
        return self._rules

    def _take(self, found: re.Match[str]) -> None:
        match found.lastgroup:
            case "rule":
                self._begin_rule(found["name"])
                # Options such as `max_tokens` end a rule by themselves.
                if found["options"]:
                    self._rules[found["name"]].insert(0, [])
            case "terminal":
                self._begin_rule(f"({len(self._rules)}")
            case "named":
                self._add(found["named"])
            case "text" | "json":
                # Any text is finite, repeated or not.
                self._add("")
            case "count":
                if int(found["times"] or found["least"] or "0") == 0:
                    self._make_optional()
            case "sign":
                self._sign(found["sign"])

    def _sign(self, sign: str) -> None:
        if sign in "([":
            name = f"({len(self._rules)}"
            self._rules[name] = [[]]
            self._open.append((name, ")" if sign == "(" else "]"))
        elif sign in ")]":
            if len(self._open) < 2 or self._open[-1][1] != sign:
                raise _NotRead
            name, _ = self._open.pop()
            self._add(name)
            if sign == "]":
                self._make_optional()
        elif sign == "|":
            self._alternatives().append([])
        elif sign in "*?":
            self._make_optional()

    def _begin_rule(self, name: str) -> None:
        if len(self._open) > 1 or name in self._rules:
            raise _NotRead
        self._rules[name] = [[]]
        self._open = [(name, "")]

    def _alternatives(self) -> list[list[_Item]]:
        if not self._open:
            raise _NotRead
        return self._rules[self._open[-1][0]]

    def _add(self, name: str) -> None:
        self._alternatives()[-1].append(_Item(name, is_optional=False))

    def _make_optional(self) -> None:
        items = self._alternatives()[-1]
        if not items:
            raise _NotRead
        items[-1] = _Item(items[-1].name, is_optional=True)
