"""Bodies of OpenAI's endpoints, decoded. Their unknown fields are refused where they would have an
effect: fields that are not served, and fields of another endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..wire import decode as wire
from .not_served import WITHOUT_EFFECT, check_misplaced, check_served
from .response_schema import ResponsesRequest
from .schema import ChatCompletionRequest, CompletionRequest
from .structured_output import FIELDS

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decodes a body. Raises `BadRequest`. Unknown fields are accepted at any depth, and named in
    the log once."""
    return wire.decode(body, kind, _is_without_effect)


def _is_without_effect(field: wire.UnknownField) -> bool:
    """Whether the field has no effect with this value. Raises `UnsupportedField` for a value that
    would have an effect."""
    is_known = check_served(field.name, field.path, field.value)
    return is_known or _is_of_other(field.path, field.value, field.kind)


def _is_of_other(name: str, value: Any, kind: type[msgspec.Struct]) -> bool:
    """Whether it is a field of another endpoint. Raises `UnsupportedField` for a value that would
    have an effect there."""
    of_others = _ANSWERING.get(kind, {})
    if name in of_others:
        check_misplaced(name, value, of_others[name])
    return name in of_others


def _fields_of_others(
    kind: type[msgspec.Struct], *others: tuple[type[msgspec.Struct], str]
) -> dict[str, str]:
    """Fields of other endpoints, each with a sentence for a client that uses it here."""
    own = {*kind.__struct_fields__, *WITHOUT_EFFECT}
    return {
        name: sentence
        for other, sentence in others
        for name in other.__struct_fields__
        if name not in own
    }


def _renamed(names: Mapping[str, str]) -> dict[str, str]:
    return {name: f"here it is `{here}`" for name, here in names.items()}


_OF_CHAT = "it is a field of /v1/chat/completions"
_OF_COMPLETIONS = "it is a field of /v1/completions"
_OF_RESPONSES = "it is a field of /v1/responses"
_IN_CHAT = {
    "input": "messages",
    "max_output_tokens": "max_completion_tokens",
    "text": "response_format",
    "reasoning": "reasoning_effort",
}
"""Names that fields of responses have in chat."""
_IN_RESPONSES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
    **{name: f"structured_outputs.{kind}" for name, kind in FIELDS.items()},
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}
"""Names that fields of chat and completions have in responses."""
_ANSWERING = {
    ChatCompletionRequest: _fields_of_others(
        ChatCompletionRequest,
        (ResponsesRequest, _OF_RESPONSES),
        (CompletionRequest, _OF_COMPLETIONS),
    )
    | _renamed(_IN_CHAT),
    CompletionRequest: _fields_of_others(
        CompletionRequest, (ResponsesRequest, _OF_RESPONSES), (ChatCompletionRequest, _OF_CHAT)
    )
    | _renamed({"input": "prompt", "max_output_tokens": "max_tokens"}),
    ResponsesRequest: _fields_of_others(
        ResponsesRequest, (CompletionRequest, _OF_COMPLETIONS), (ChatCompletionRequest, _OF_CHAT)
    )
    | _renamed(_IN_RESPONSES),
}
