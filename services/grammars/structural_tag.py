"""Converts structural tags to a grammar: free text in which an opening tag begins constrained text.

It takes both forms that clients use: `{"structures": [{"begin", "schema", "end"}], "triggers":
[…]}`, and a tree of formats below `"format"` (in the terms of xgrammar, and so of vLLM and SGLang).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..runtime.errors import BadRequest
from ..runtime.request_limits import MAX_GRAMMAR_BYTES
from . import lark
from .json_schema import check_schema
from .lark import ANY_TEXT, expression, literal, quoted
from .prepared_schema import prepared

FORMATS = (
    "any_text, const_string, json_schema, regex, grammar, tag, sequence, or, "
    "triggered_tags or tags_with_separator"
)


def structural_tag_grammar(
    param: str, tag: object, special_tokens: Mapping[str, int], *, closes_schemas: bool = False
) -> list[dict[str, Any]]:
    """The grammar and those that it references. `closes_schemas`: objects have only the properties
    that their schema names. Raises `BadRequest`."""
    if not isinstance(tag, dict):
        raise BadRequest.of(
            param, tag, "an object with `format`, or with `structures` and `triggers`"
        )
    writer = _Writer(param, special_tokens, closes_schemas=closes_schemas)
    root = writer.rule(tag["format"] if "format" in tag else _from_structures(tag), "format")
    return writer.grammars(root)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """Converts the older form to the newer."""
    structures = tag.get("structures")
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each.get("end"),
        }
        for each in (structures if isinstance(structures, list) else [])
        if isinstance(each, dict)
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes one rule a format; `at` is the place in the client's JSON."""

    def __init__(
        self, param: str, special_tokens: Mapping[str, int], *, closes_schemas: bool
    ) -> None:
        self._param = param
        self._special = special_tokens
        self._closes_schemas = closes_schemas
        self._rules: list[str] = []
        self._num_bytes = 0
        """Size of all rules. Few tools make many where each argument of a call gets all
        definitions."""
        self._others: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}
        """Rules of formats that others refer to, by the identity of the format."""

    def grammars(self, root: str) -> list[dict[str, Any]]:
        text = "\n".join([f"start: {root}", *self._rules])
        return [{"name": "structure", "lark_grammar": text}, *self._others]

    def rule(self, form: object, at: str) -> str:
        """Name of the rule of a format."""
        match form:
            case {"type": "any_text"}:
                return ANY_TEXT
            case {"type": "const_string", "value": str(value)} if value:
                return self._literal(value)
            case {"type": "json_schema" | "regex" | "grammar"}:
                return self._matching(form, at)
            case {"type": "sequence" | "or" as kind, "elements": [*elements]} if elements:
                names = [
                    self._named(each, f"{at}.elements[{i}]") for i, each in enumerate(elements)
                ]
                return (" " if kind == "sequence" else " | ").join(names)
            case _:
                return self._tags(form, at)

    def _matching(self, form: object, at: str) -> str:
        match form:
            case {"type": "json_schema", "json_schema": schema}:
                check_schema(self._param, schema)
                ready = prepared(self._param, schema, closes=self._closes_schemas)
                return f"%json {json.dumps(ready, ensure_ascii=False)}"
            case {"type": "regex", "pattern": str(pattern)}:
                return expression(self._param, pattern)
            case {"type": "grammar", "grammar": str(grammar)} if grammar:
                return self._other(lark.grammar(self._param, grammar, self._special))
            case _:
                raise self._no_format(form, at)

    def _tags(self, form: Any, at: str) -> str:
        match form:
            case {"type": "tag"}:
                return self._tag(form, at)
            case {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags]} if (
                triggers and tags
            ):
                return self._triggered(form, triggers, tags, at)
            case {"type": "tags_with_separator", "tags": [*tags], "separator": str(separator)} if (
                tags
            ):
                return self._separated(form, tags, separator, at)
            case _:
                raise self._no_format(form, at)

    def _no_format(self, form: object, at: str) -> BadRequest:
        return self._refusal(at, form, f"an object whose type is {FORMATS}, and its fields")

    def _refusal(self, at: str, value: object, allowed: str) -> BadRequest:
        """Error for a value at a path inside the tag."""
        return BadRequest(self._param, BadRequest.of(f"{self._param}.{at}", value, allowed).message)

    def _named(self, form: object, at: str) -> str:
        if id(form) not in self._names:
            self._names[id(form)] = self._define(self.rule(form, at))
        return self._names[id(form)]

    def _define(self, body: str, options: str = "", *, kind: str = "r") -> str:
        """Name of a new rule; of a terminal with the kind `T`."""
        name = f"{kind}{len(self._rules)}"
        self._count(body)
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _other(self, grammar: str) -> str:
        name = f"g{len(self._others)}"
        self._count(grammar)
        self._others.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def _count(self, text: str) -> None:
        """Counts the bytes of a rule or grammar. Raises `BadRequest` where all together are more
        than engines take."""
        self._num_bytes += len(json.dumps(text, ensure_ascii=False).encode())
        if self._num_bytes > MAX_GRAMMAR_BYTES:
            most = MAX_GRAMMAR_BYTES
            raise BadRequest(
                self._param,
                f"the grammar of {self._param} has more than {most} bytes; allowed: at most {most}",
            )

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _tag(self, form: Any, at: str, *, after: str = "") -> str:
        """Rule of a tag whose opening `after` has been read."""
        begin, end = self._ends(form, at)
        if not begin.startswith(after):
            raise self._refusal(
                f"{at}.begin", begin, f"text that starts with its trigger {after!r}"
            )
        opening = self._literal(begin.removeprefix(after)) if begin != after else ""
        content = form.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"{opening} {self._text_up_to(end)}"
        return (
            f"{opening} {self._named(content, f'{at}.content')} {self._literal(end) if end else ''}"
        )

    def _ends(self, form: object, at: str) -> tuple[str, str]:
        match form:
            case {"begin": str(begin), "content": dict(), "end": str(end) | [str(end)]}:
                return begin, end
            case _:
                allowed = "an object with `begin` and `end`, both strings, and `content`, a format"
                raise self._refusal(at, form, allowed)

    def _text_up_to(self, end: str) -> str:
        """Rule of any text that ends with the first `end`."""
        if not end:
            return ANY_TEXT
        at = min((end.find(token) for token in self._special if token in end), default=-1)
        if at < 0:
            return self._define(ANY_TEXT, f"[suffix={quoted(end)}]")
        # The text ends at the first special token. The part of the end mark before that token is in
        # one lexeme with the text, which would consume it otherwise.
        text = self._define(f"{ANY_TEXT} {quoted(end[:at])}", kind="T") if at else ANY_TEXT
        return f"{text} {self._literal(end[at:])}"

    def _triggered(self, form: Any, triggers: list[Any], tags: list[Any], at: str) -> str:
        """Rule of free text; after a trigger only the tags that begin with it are allowed."""
        for i, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise self._refusal(f"{at}.triggers[{i}]", trigger, "a string that is not empty")
        bodies: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            begin, _ = self._ends(tag, f"{at}.tags[{i}]")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise self._refusal(
                    f"{at}.tags[{i}].begin", begin, f"text that starts with one of {triggers}"
                )
            bodies.setdefault(trigger, []).append(
                self._define(self._tag(tag, f"{at}.tags[{i}]", after=trigger))
            )
        heads = [
            f"{self._text_up_to(trigger)} ({' | '.join(those)})"
            for trigger, those in bodies.items()
        ]
        call = self._define(" | ".join(heads))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else f"{call} | {self._define(ANY_TEXT)}"
        return f"{call}{'+' if form.get('at_least_one') else '*'} {self._define(ANY_TEXT)}"

    def _separated(self, form: Any, tags: list[Any], separator: str, at: str) -> str:
        one = self._define(
            " | ".join(
                self._define(self._tag(tag, f"{at}.tags[{j}]")) for j, tag in enumerate(tags)
            )
        )
        more = (
            ""
            if form.get("stop_after_first")
            else f"({self._literal(separator) if separator else ''} {one})*"
        )
        body = f"{one} {more}"
        return body if form.get("at_least_one") else f"({body})?"
