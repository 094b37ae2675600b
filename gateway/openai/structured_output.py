"""Converts the fields by which clients constrain answers to the contract's structured output.

OpenAI's `response_format`, and `structured_outputs` and `guided_*` as vLLM's clients send them, and
SGLang's fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from headwater.proto.common_pb2 import Sampling, StructuredOutput
from headwater.services.runtime.client_json import read_json
from headwater.services.runtime.errors import BadRequest

from .schema import Answering, ResponseFormat, StructuredOutputs

Asked = tuple[str, StructuredOutput]
"""Client's name of the field, and its constraint."""
FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
"""Kinds of the constraints that have a field of their own: vLLM's, then SGLang's."""
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of `StructuredOutputs` that are constraints."""
_CONSTRAINTS = ("response_format", "structured_outputs", *FIELDS)
_VALUES = attrgetter(*_CONSTRAINTS)
_NONE = (None,) * len(_CONSTRAINTS)
FORMATS = "text, json_object, json_schema, regex, grammar or structural_tag"


def put_structured_output(asked: Answering, sampling: Sampling) -> dict[str, str]:
    """Sets the constraint in the sampling message; returns the client's name of the field by the
    contract's, if there is one. Raises `BadRequest` for constraints of more than one kind."""
    if _VALUES(asked) == _NONE:
        return {}
    found = [
        *_of_response_format(asked.response_format),
        *structured_outputs_to_pb(asked.structured_outputs),
    ]
    found += [
        (name, _to_pb(kind, value))
        for name, kind in FIELDS.items()
        if (value := getattr(asked, name)) is not None
    ]
    if not found:
        return {}
    name, output = only_constraint(found)
    whitespace = whitespace_of(asked.structured_outputs)
    if (
        whitespace := asked.guided_whitespace_pattern if whitespace is None else whitespace
    ) is not None:
        output.whitespace_pattern = whitespace
    sampling.structured_output.CopyFrom(output)
    return {f"structured_output.{output.WhichOneof('kind')}": name}


def only_constraint(found: Sequence[Asked]) -> Asked:
    """The constraint of a request. Clients of old and new servers may write the same one in two
    fields; raises `BadRequest` for two that differ."""
    (name, output), *others = found
    for other_name, other in others:
        if other.strict:
            output.strict = True
        if _meaning(other_name, other) != _meaning(name, output):
            raise BadRequest(
                other_name,
                f"{other_name} beside another {name}; allowed: one kind of structured output, "
                "one value",
            )
    return name, output


def _meaning(name: str, output: StructuredOutput) -> tuple[str, Any]:
    """Value by which two constraints are compared: JSON by its value, however it is written. Raises
    `BadRequest`."""
    kind = output.WhichOneof("kind") or ""
    value = getattr(output, kind)
    if kind in ("json_schema", "structural_tag"):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            # Objects are the same in any order of their keys.
            value = msgspec.json.encode(read_json(value, name), order="deterministic")
    elif kind == "choice":
        value = tuple(value.choices)
    return kind, value


def format_to_pb(form: ResponseFormat, at: str) -> Asked | None:
    """Constraint of a response format; None: text. `at` is the field's name."""
    match form.type:
        case "text":
            return None
        case "json_object":
            return f"{at}.type", StructuredOutput(json_object=True)
        case "json_schema":
            # The Responses API has the schema one level up.
            nested = form.json_schema
            schema, name = (
                (form.schema, f"{at}.schema")
                if nested is None and form.schema is not None
                else (nested and nested.schema, f"{at}.json_schema.schema")
            )
            if schema is None:
                raise BadRequest(
                    name, f"{name} is missing; allowed: a JSON Schema", code="missing_field"
                )
            return name, StructuredOutput(
                json_schema=_json(schema), strict=None if nested is None else nested.strict
            )
        case "regex" if form.pattern is not None:
            return f"{at}.pattern", StructuredOutput(regex=form.pattern)
        case "grammar" if form.grammar is not None:
            return f"{at}.grammar", StructuredOutput(grammar=form.grammar)
        case "structural_tag":
            fields = {
                "format": form.format,
                "structures": form.structures,
                "triggers": form.triggers,
            }
            given = {name: value for name, value in fields.items() if value is not None}
            return at, StructuredOutput(structural_tag=_json(given))
        case _:
            raise BadRequest.of(f"{at}.type", form.type, f"{FORMATS}, with its field")


def _of_response_format(form: ResponseFormat | None) -> Iterator[Asked]:
    if form is not None and (asked := format_to_pb(form, "response_format")) is not None:
        yield asked


def structured_outputs_to_pb(given: StructuredOutputs | None) -> Iterator[Asked]:
    """Raises `BadRequest` for an object that asks for nothing."""
    if given is None:
        return
    if given == StructuredOutputs():
        raise BadRequest.of("structured_outputs", {}, f"one of {', '.join(KINDS)}")
    for kind in KINDS:
        value = getattr(given, kind)
        # A flag that is off asks for nothing.
        if value is not None and value is not False:
            output = _to_pb(kind, value)
            if given.disable_additional_properties:
                output.strict = True
            yield f"structured_outputs.{kind}", output


def _to_pb(kind: str, value: Any) -> StructuredOutput:
    match kind:
        case "json":
            return StructuredOutput(json_schema=_json(value))
        case "choice":
            return StructuredOutput(choice=StructuredOutput.Choices(choices=value))
        case "structural_tag":
            return StructuredOutput(structural_tag=_json(value))
        case _:
            return StructuredOutput(**{kind: value})


def _json(value: Any) -> str:
    """Text of a schema, which may come as JSON or as text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def whitespace_of(given: StructuredOutputs | None) -> str | None:
    """Whitespace that may separate the tokens of JSON, if the client says so."""
    if given is None:
        return None
    return "" if given.disable_any_whitespace else given.whitespace_pattern
