"""Prepares a JSON Schema for llguidance: says in its terms what it would otherwise take too widely
or follow into dead ends."""

from __future__ import annotations

from typing import Any

from ..runtime.errors import BadRequest
from .closed_schema import closed
from .endless import endless
from .formats import with_patterns
from .open_objects import escapes, with_named_patterns, with_words_behind_names
from .subschemas import Schema, rewritten

WHITESPACE = r"(\r?\n)?[ \t]{0,40}"
"""Pattern of white space between tokens of JSON: compact, spaced or indented. It is bounded, since
a model that writes only spaces never ends."""
ANNOTATIONS = frozenset(("title", "description", "examples", "default", "$comment"))
"""Keywords without effect on validation."""


def prepared(
    param: str, schema: Any, *, whitespace: str = WHITESPACE, closes: bool = False
) -> Schema:
    """The schema as llguidance is to read it, with its options. `whitespace` is a pattern;
    `closes`: objects have no properties but those that the schema names. The argument has been
    checked and is not changed. Raises `BadRequest`."""
    if not isinstance(schema, dict):
        schema = {}
    if closes:
        schema = closed(schema)
    ready = with_words_behind_names(with_named_patterns(_finite(param, schema)))
    options: Schema = (
        {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    )
    if (allowed := escapes(param, ready)) is not None:
        options["json_allowed_escapes"] = allowed
    return ready | {"x-guidance": options}


def refuse_endless(param: str, schema: Schema) -> None:
    """Raises `BadRequest` where no finite value matches the schema."""
    if id(schema) in endless(schema):
        raise _refusal(param)


def _finite(param: str, schema: Schema) -> Schema:
    """The schema with `false` for parts that no finite value matches, without annotations, and with
    formats that llguidance knows well enough."""
    without_end = endless(schema)
    if id(schema) in without_end:
        raise _refusal(param)

    def rewrite(original: Schema, copy: Schema) -> object:
        if id(original) in without_end:
            return False
        kept = {name: value for name, value in copy.items() if name not in ANNOTATIONS}
        return with_patterns(kept)

    finite = rewritten(schema, rewrite)
    assert isinstance(finite, dict)
    return finite


def _refusal(param: str) -> BadRequest:
    return BadRequest(
        param,
        f"{param} cannot be followed: nothing that ends matches it",
        code="invalid_grammar",
    )
