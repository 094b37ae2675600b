"""A body to a typed request, or an error that names the field, its value and what is allowed."""

from __future__ import annotations

import json
import re
import types
import typing
from functools import cache
from typing import Any, TypeVar

import msgspec
import structlog

from headwater.gateway.openai.not_served import check_misplaced, check_served
from headwater.gateway.openai.response_schema import ResponsesRequest
from headwater.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from headwater.services.errors import BadRequest

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
MAX_WARNED = 1000
_WHERE = re.compile(r" - at `\$(.*)`$")
_KEY = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"missing required field `(.*?)`")
_warned: set[str] = set()


def _fields_of_others(kind: type[msgspec.Struct], *others: tuple[type[msgspec.Struct], str]) -> dict[str, str]:
    """Fields that another endpoint has, with what is said to who uses them here."""
    own = kind.__struct_fields__
    return {name: said for other, said in others for name in other.__struct_fields__ if name not in own}


_OF_CHAT, _OF_COMPLETIONS = "it is a field of /v1/chat/completions", "it is a field of /v1/completions"
_ANSWERING = {
    ChatCompletionRequest: _fields_of_others(ChatCompletionRequest, (CompletionRequest, _OF_COMPLETIONS)),
    CompletionRequest: _fields_of_others(CompletionRequest, (ChatCompletionRequest, _OF_CHAT)),
    ResponsesRequest: _fields_of_others(
        ResponsesRequest, (ChatCompletionRequest, _OF_CHAT), (CompletionRequest, _OF_COMPLETIONS)
    ),
}


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Raises `BadRequest`. Fields that nobody knows are accepted and named in the log once."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _check_names(fields, kind)
        request: RequestT = _decoder(kind).decode(body)
        return request
    except msgspec.ValidationError as fault:
        raise _explained(str(fault), body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _no_json(fault) from None


@cache
def _decoder(kind: type[RequestT]) -> msgspec.json.Decoder[RequestT]:
    return msgspec.json.Decoder(kind)


def _check_names(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
    for name in fields.keys() - set(kind.__struct_fields__):
        if check_served(name, fields[name]):
            continue
        if kind in _ANSWERING and name in _ANSWERING[kind]:
            check_misplaced(name, fields[name], _ANSWERING[kind][name])
        elif name not in _warned and len(_warned) < MAX_WARNED:
            _warned.add(name)
            structlog.get_logger().warning("field without effect", field=name[:80], request=kind.__name__)


def _explained(fault: str, body: bytes, kind: type[msgspec.Struct]) -> BadRequest:
    where = _WHERE.search(fault)
    path = where.group(1) if where is not None else ""
    missing = _MISSING.search(fault)
    if missing is not None:
        param = f"{path}.{missing.group(1)}".lstrip(".")
        return BadRequest(
            param, f"{param} is missing; allowed: {_allowed(kind, param, 'a value')}", code="missing_field"
        )
    if not path:
        return BadRequest(None, "the body is no JSON object; allowed: an object with the request's fields")
    try:
        # Not the decoder that refused: it refuses numbers beyond a float's range wherever they stand.
        param, value = _look_up(json.loads(body), path)
    except (ValueError, RecursionError) as broken:
        return _no_json(broken)
    return BadRequest.of(param, value, _allowed(kind, param, _expected(fault)))


def _no_json(fault: Exception) -> BadRequest:
    return BadRequest(None, f"the body is not valid JSON: {fault}", code="invalid_json")


def _look_up(value: Any, path: str) -> tuple[str, Any]:
    """The full name and the value at a path; an entry that the path leaves open ([...]) is the whole object's."""
    param = ""
    for key, index in _KEY.findall(path):
        if index == "...":
            break
        value = value[key] if key else value[int(index)]
        param += f".{key}" if key else f"[{index}]"
    return param.lstrip("."), value


def _allowed(kind: type[msgspec.Struct], param: str, otherwise: str) -> str:
    """The sentence beside the field's type, where the field itself is meant and not something inside it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return _description(hints.get(param)) or otherwise


def _description(hint: Any) -> str | None:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    metas = [
        meta for part in (typing.get_args(hint) if is_union else (hint,)) for meta in getattr(part, "__metadata__", ())
    ]
    return next((meta.description for meta in reversed(metas) if meta.description), None)


_WORDS = {
    "`": "",
    "int": "a whole number",
    "str": "a string",
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "|": "or",
}


def _expected(fault: str) -> str:
    """What is left of the decoder's own sentence: its types, in words."""
    words = fault.split(", got", maxsplit=1)[0].split(" - at ", maxsplit=1)[0].removeprefix("Expected ")
    for name, said in _WORDS.items():
        words = words.replace(name, said)
    return words
