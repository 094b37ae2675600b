"""Converts the structured output that a client asks for to one grammar in llguidance's format.

Constraints that a grammar cannot express are refused by name, before anything is compiled.
`checker` finds out whether a grammar compiles in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.proto.common_pb2 import StructuredOutput

from ..runtime.errors import BadRequest
from . import lark
from .ascii_escapes import ascii_regex
from .json_schema import check_schema, parse_json
from .prepared_schema import WHITESPACE, prepared
from .spelling import check_spelling
from .structural_tag import structural_tag_grammar

MAX_BYTES = 256 << 10
"""Largest number of bytes of a schema, an expression, a grammar, or all choices together."""
MAX_CHOICES = 4096
ANY_OBJECT = {"type": "object"}
KINDS = "json_schema, json_object, regex, choice, grammar or structural_tag"


def param_of(asked: StructuredOutput) -> str:
    """Name of the field in the contract; the gateway knows the client's name."""
    return f"structured_output.{asked.WhichOneof('kind') or 'kind'}"


def grammar_of(
    asked: StructuredOutput,
    special_tokens: Mapping[str, int],
    *,
    closes_schemas: bool = False,
    missing_bytes: frozenset[int] = frozenset(),
) -> str:
    """Grammar of the constraint. `special_tokens` are ids of tokens that are no text, by their
    text. `closes_schemas`: objects have no properties but those that their schema names, also where
    the request is not strict. `missing_bytes` are in no token. Raises `BadRequest`."""
    param = param_of(asked)
    kind = asked.WhichOneof("kind")
    closes = asked.strict or closes_schemas
    if (size := asked.ByteSize()) > MAX_BYTES:
        raise BadRequest(param, f"{param} has {size} bytes; allowed: at most {MAX_BYTES}")
    if asked.HasField("whitespace_pattern") and kind not in ("json_schema", "json_object"):
        raise BadRequest(
            "whitespace_pattern", f"whitespace_pattern with {param}; allowed: with JSON"
        )
    match kind:
        case "json_schema":
            schema = parse_json(param, asked.json_schema)
            check_schema(param, schema)
            whitespace = _whitespace(asked)
            ready = prepared(param, schema, whitespace=whitespace, closes=closes)
            return _grammars({"json_schema": ready})
        case "json_object":
            BadRequest.unless(asked.json_object, param, False, "true")
            ready = prepared(param, ANY_OBJECT, whitespace=_whitespace(asked))
            return _grammars({"json_schema": ready})
        case "regex":
            check_spelling(param, asked.regex, missing_bytes)
            return _grammars({"lark_grammar": f"start: {lark.expression(param, asked.regex)}"})
        case "choice":
            check_spelling(param, "".join(asked.choice.choices), missing_bytes)
            return _grammars({"lark_grammar": _choices(param, list(asked.choice.choices))})
        case "grammar":
            check_spelling(param, asked.grammar, missing_bytes)
            return _grammars({"lark_grammar": lark.grammar(param, asked.grammar, special_tokens)})
        case "structural_tag":
            tag = parse_json(param, asked.structural_tag)
            check_spelling(param, "".join(_fixed_texts(tag)), missing_bytes)
            return _grammars(
                *structural_tag_grammar(param, tag, special_tokens, closes_schemas=closes)
            )
        case _:
            raise BadRequest(param, f"{param} is empty; allowed: {KINDS}")


def _whitespace(asked: StructuredOutput) -> str:
    return (
        ascii_regex(asked.whitespace_pattern)
        if asked.HasField("whitespace_pattern")
        else WHITESPACE
    )


def _fixed_texts(tag: object) -> Iterator[str]:
    """Strings of a structural tag outside of schemas: openings, ends and fixed texts among them."""
    if isinstance(tag, str):
        yield tag
    elif isinstance(tag, list):
        for each in tag:
            yield from _fixed_texts(each)
    elif isinstance(tag, dict):
        for name, each in tag.items():
            if name not in ("json_schema", "schema"):
                yield from _fixed_texts(each)


def _choices(param: str, choices: list[str]) -> str:
    BadRequest.unless(
        choices and "" not in choices, param, choices, "at least one string, none empty"
    )
    if len(choices) > MAX_CHOICES:
        raise BadRequest(
            param, f"{param} has {len(choices)} strings; allowed: at most {MAX_CHOICES}"
        )
    # A terminal is one state for all strings that are still possible; a rule has an item for each,
    # and more than `max_items_in_row` of them are refused. Of 1,900 long tokens a mask took 27 ms
    # in a rule, 0.7 ms in a terminal.
    return f"start: CHOICE\nCHOICE: {lark.alternatives(dict.fromkeys(choices))}"


def _grammars(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
