"""A body to a typed request, or an error that names the field, its value and what is allowed."""

from __future__ import annotations

import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from headwater.services.runtime.client_json import WHOLE_BYTES, read_in_pieces
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.json_limits import MAX_FIELD_VALUES, check_json

from ..long_work import LONG_BODY_BYTES, without_collector
from .body import MAX_NAME_CHARS, Unknown, known_part
from .noted import note

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
MAX_PLACE_CHARS = 512
TEMPLATE_VARIABLES = "chat_template_kwargs"
MAX_DIGITS = sys.int_info.default_max_str_digits
"""Most digits of a whole number that Python reads."""
_UNKNOWN = "Object contains unknown field"
_WHERE = re.compile(r" - at `\$(.*)`$")
_KEY = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"missing required field `(.*?)`")
_NO_FIELD = re.compile(rf"{_UNKNOWN} `(.*?)`")
_NUMBERS = f"numbers up to {sys.float_info.max:.1e}, of at most {MAX_DIGITS} digits"
_SURROGATE = re.compile("[\ud800-\udfff]")
_INDEX = re.compile(r"\[\d+\]")


class UnknownField(NamedTuple):
    """A field of a body that its kind does not have."""

    name: str
    """Path without the numbers of lists, as `messages[].foo`."""
    path: str
    value: Any
    kind: type[msgspec.Struct]


IsWithoutEffect = Callable[[UnknownField], bool]
"""Function that returns whether an unknown field has no effect. It raises `UnsupportedField` for a
field that would have one."""


def decode(body: bytes, kind: type[RequestT], is_without_effect: IsWithoutEffect) -> RequestT:
    """Decodes a body. Raises `BadRequest`. Unknown fields are accepted at any depth; those that are
    not known to have no effect are named in the log, once."""
    check_json(body)
    try:
        with without_collector(len(body)):
            read = _decoded if len(body) <= WHOLE_BYTES else _read_long
            return read(body, kind, is_without_effect)
    except msgspec.ValidationError as fault:
        # Not the same decoder again: it refuses numbers beyond a float's range at any place.
        raise _explained(
            str(fault), kind, (lambda: _read(body)) if _is_short(body) else None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        named = _half_character(body) or _named_fault(body) if _is_short(body) else None
        raise named or _no_json(fault) from None


def _decoded(body: bytes, kind: type[RequestT], is_without_effect: IsWithoutEffect) -> RequestT:
    """Decodes a body at once. Raises `ValidationError`."""
    try:
        request: RequestT = _decoder(kind).decode(body)
    except msgspec.ValidationError as fault:
        if not str(fault).startswith(_UNKNOWN):
            raise
    else:
        return request
    try:
        parsed = msgspec.json.decode(body)
    except msgspec.ValidationError:
        # Without types only numbers are refused, and the decoder tells no names of their places.
        raise _number_out_of_range(body) from None
    return _without_unknown(parsed, kind, is_without_effect)


def _read_long(body: bytes, kind: type[RequestT], is_without_effect: IsWithoutEffect) -> RequestT:
    """Decodes a long body, in pieces. Raises `ValidationError`, `BadRequest`."""
    if b'"%b"' % TEMPLATE_VARIABLES.encode() in body:
        _check_variables(body)
    try:
        parsed = read_in_pieces(body)
    except msgspec.ValidationError:
        raise _number_out_of_range(body) from None
    try:
        return msgspec.convert(parsed, kind)
    except msgspec.ValidationError as fault:
        if not str(fault).startswith(_UNKNOWN):
            raise
    return _without_unknown(parsed, kind, is_without_effect)


def _check_variables(body: bytes) -> None:
    """Checks variables of the chat template before they are decoded. A processor would refuse them,
    too, a fifth of a second later. Raises `BadRequest`."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    variables = fields.get(TEMPLATE_VARIABLES, msgspec.Raw())
    check_json(bytes(variables), TEMPLATE_VARIABLES, max_values=MAX_FIELD_VALUES)


def build_decoders(*kinds: type[msgspec.Struct]) -> None:
    """Builds decoders. To be called before threads decode these kinds. NOTE: two threads in which
    msgspec (0.22) looks at a type for the first time at the same moment end the process by a
    segmentation fault."""
    for kind in kinds:
        _decoder(kind)


def convert(value: Any, kind: type[RequestT], at: str) -> RequestT:
    """Converts the value at a place of a body that was decoded. Raises `BadRequest`, also for
    unknown fields."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as fault:
        raise _explained(str(fault), kind, lambda: value, at) from None


def _without_unknown(
    parsed: Any, kind: type[RequestT], is_without_effect: IsWithoutEffect
) -> RequestT:
    """Converts parsed JSON, whose unknown fields it names in the log. Raises `ValidationError`."""
    unknown: Unknown = []
    known = known_part(parsed, kind, unknown)
    for path, value in unknown:
        name = _INDEX.sub("[]", path)
        if not is_without_effect(UnknownField(name, path, value, kind)):
            shown = path[:MAX_NAME_CHARS]
            note("field without effect", name[:MAX_NAME_CHARS], field=shown, request=kind.__name__)
    return msgspec.convert(known, kind)


@cache
def _decoder(kind: type[RequestT]) -> msgspec.json.Decoder[RequestT]:
    return msgspec.json.Decoder(kind)


def _is_short(body: bytes) -> bool:
    """Whether the fault is looked for: for that the whole body is read again, more slowly, and into
    several times its memory."""
    return len(body) < LONG_BODY_BYTES


def _explained(
    fault: str, kind: type[msgspec.Struct], read: Callable[[], Any] | None, at: str = ""
) -> BadRequest:
    """Error for a value that the decoder refused. `read` returns the decoder's input as plain data,
    which is at path `at`; None: it is too long for that."""
    where = _WHERE.search(fault)
    path = where.group(1) if where is not None else ""
    if (missing := _MISSING.search(fault)) is not None:
        field = f"{path}.{missing.group(1)}"
        param = f"{at}{field}".lstrip(".")
        return BadRequest(
            param,
            f"{param} is missing; allowed: {_allowed(kind, field, _type_of(kind, field))}",
            code="missing_field",
        )
    if (unknown := _NO_FIELD.match(fault)) is not None:
        param = f"{at}{path}.{unknown.group(1)}".lstrip(".")[:MAX_PLACE_CHARS]
        fields = ", ".join(_fields(_hint_at(kind, path)))
        return BadRequest(
            param, f"{param} is no field that exists; allowed: {fields}", code="unknown_field"
        )
    if not path:
        return BadRequest(
            None, "the body is no JSON object; allowed: an object with the request's fields"
        )
    if read is None:
        field = path.partition("[...]")[0]
        param = f"{at}{field}".lstrip(".")[:MAX_PLACE_CHARS]
        return BadRequest(
            param, f"{param} cannot be used; allowed: {_allowed(kind, field, _expected(fault))}"
        )
    try:
        field, value = _look_up(read(), path)
    except (ValueError, RecursionError) as broken:
        return _no_json(broken)
    return BadRequest.of(f"{at}{field}".lstrip("."), value, _allowed(kind, field, _expected(fault)))


def _named_fault(body: bytes) -> BadRequest | None:
    """Error for a fault that the decoder describes badly: it counts bytes from the start of a
    string, and calls an empty body truncated. None: it is another one."""
    if not body:
        return _no_json("it is empty")
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        return _no_json(f"it is not UTF-8 (byte {fault.start})")
    return None


def _no_json(fault: Exception | str) -> BadRequest:
    return BadRequest(None, f"the body is not valid JSON: {fault}", code="invalid_json")


def _half_character(body: bytes) -> BadRequest | None:
    """Error for a lone half of an escaped surrogate pair: JSON allows it, Unicode does not, and the
    decoder calls it truncated. None: there is none."""
    found = _find(body, lambda value: isinstance(value, str) and _SURROGATE.search(value))
    return found and BadRequest.of(*found, r"text whose \ud800…\udfff come in pairs")


def _number_out_of_range(body: bytes) -> BadRequest:
    """Error for the number that the decoder refused, at a place that no type describes."""
    found = (
        _find(body, lambda value: isinstance(value, float) and math.isinf(value))
        if _is_short(body)
        else None
    )
    return (
        BadRequest.of(*found, _NUMBERS)
        if found
        else BadRequest(None, f"a number is too large; allowed: {_NUMBERS}")
    )


def _find(body: bytes, is_at_fault: Callable[[Any], object]) -> tuple[str, Any] | None:
    """Place and value of a value, or of a name, that is at fault; None: there is none."""
    try:
        places: list[tuple[_Place, Any]] = [(None, _read(body))]
    except (ValueError, RecursionError):
        return None
    while places:
        at, value = places.pop()
        if isinstance(value, dict):
            places += [
                ((at, f".{name[:MAX_NAME_CHARS]}"), each)
                for name, part in value.items()
                for each in (part, name)
            ]
        elif isinstance(value, list):
            places += [((at, f"[{i}]"), part) for i, part in enumerate(value)]
        elif is_at_fault(value):
            return _written(at).encode(errors="backslashreplace").decode(), value
    return None


def _read(body: bytes) -> Any:
    """Body as plain data, where numbers that the decoder refuses are infinite."""
    return json.loads(
        body, parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else float(digits)
    )


_Place = tuple["_Place", str] | None
"""Place of a value, from the innermost name outwards: it is written out only for the place that an
error names."""


def _written(place: _Place) -> str:
    names = []
    while place is not None:
        place, name = place
        names.append(name)
    return "".join(reversed(names)).lstrip(".")[:MAX_PLACE_CHARS]


def _look_up(value: Any, path: str) -> tuple[str, Any]:
    """Path in names, and the value there; an entry that the path leaves open ([...]) stands for the
    whole object."""
    param = ""
    for key, index in _KEY.findall(path):
        if index == "...":
            break
        value = value[key] if key else value[int(index)]
        param += f".{key}" if key else f"[{index}]"
    return param, value


def _allowed(kind: type[msgspec.Struct], field: str, otherwise: str) -> str:
    """Sentence beside the field's type, or its values where they are few; `otherwise`, where the
    error is about something inside the field."""
    hint = _hint_at(kind, field)
    values = [
        value
        for each in _members(hint)
        if typing.get_origin(each) is Literal
        for value in typing.get_args(each)
    ]
    return _description(hint) or ", ".join(map(str, values)) or otherwise


def _type_of(kind: type[msgspec.Struct], field: str) -> str:
    """Type of a field in words."""
    [*members] = _members(_hint_at(kind, field))
    names = [_word_of(each) for each in members if each is not type(None)]
    return " or ".join(names) if names and all(names) else "a value"


def _word_of(hint: Any) -> str:
    """Type without parts in words; empty: there is no word for it."""
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, (msgspec.Struct, dict)):
        return _WORDS["object"]
    return _WORDS["array"] if origin is list else _WORDS.get(getattr(hint, "__name__", ""), "")


def _hint_at(kind: type[msgspec.Struct], path: str) -> Any:
    """Type of the value at a path, where it is known."""
    hint: Any = kind
    for key, index in _KEY.findall(path):
        hint = _fields(hint).get(key) if key else _item(hint) if index else None
    return hint


def _fields(hint: Any) -> Mapping[str, Any]:
    """Types of an object's fields."""
    structs = [
        each
        for each in _members(hint)
        if isinstance(each, type) and issubclass(each, msgspec.Struct)
    ]
    return _hints(structs[0]) if structs else {}


def _item(hint: Any) -> Any:
    """Type of a list's items."""
    return next(
        (typing.get_args(each)[0] for each in _members(hint) if typing.get_origin(each) is list),
        None,
    )


def _members(hint: Any) -> list[Any]:
    """Members of a type that may be a union, without annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [member for each in typing.get_args(hint) for member in _members(each)]
    return [hint]


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


def _description(hint: Any) -> str | None:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    metas = [
        meta
        for part in (typing.get_args(hint) if is_union else (hint,))
        for meta in getattr(part, "__metadata__", ())
    ]
    return next((meta.description for meta in reversed(metas) if meta.description), None)


_WORDS = {
    "`": "",
    "int": "a whole number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "bool": "true or false",
    "float": "a number",
    "|": "or",
}


def _expected(fault: str) -> str:
    """Expected types in words, from the decoder's own sentence."""
    words = (
        fault.split(", got", maxsplit=1)[0].split(" - at ", maxsplit=1)[0].removeprefix("Expected ")
    )
    for name, phrase in _WORDS.items():
        words = words.replace(name, phrase)
    return words
