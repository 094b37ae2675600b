"""Items of a response's conversation: as messages, as they are listed, and without the oldest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.proto.common_pb2 import ChatMessage
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.message_roles import ROLES, check_role

from ..wire.body import known_part
from ..wire.noted import note
from ..wire.required import given, missing
from .response_schema import InputItem, InputPart
from .response_tools import ResponseTools

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
ITEM_TYPES = (
    "message, function_call, function_call_output, custom_tool_call, "
    "custom_tool_call_output, reasoning, or in a response item_reference, and items of hosted tools"
)
TEXT = "a string or a list of text parts"
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
HOSTED_CALLS = {
    "apply_patch_call": "operation",
    "local_shell_call": "action",
    "shell_call": "action",
}
"""Calls of hosted tools that clients run, each with the field of its arguments."""
HOSTED_OUTPUTS = tuple(f"{call}_output" for call in HOSTED_CALLS)
PASSED_OVER = (
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
"""Items of tools that OpenAI runs, written by another server's model; messages cannot represent
them."""


def check_items(items: Sequence[InputItem], name: str) -> None:
    """Checks items of a conversation; `name` is the list's. Raises `BadRequest`."""
    messages: list[ChatMessage] = []
    for position, item in enumerate(items):
        add_item(messages, item, f"{name}[{position}]", ResponseTools(None))


def as_item(item: InputItem, fallback_id: str) -> dict[str, Any]:
    """An item as it is listed: with an id, and text in parts."""
    fields: dict[str, Any] = _given_fields(msgspec.to_builtins(item))
    for name in ("content", "output", "summary"):
        if isinstance(fields.get(name), list):
            fields[name] = [
                _given_fields(part) if isinstance(part, dict) else part for part in fields[name]
            ]
    if item.type == "message" and isinstance(item.content, str):
        is_answer = item.role == "assistant"
        kind = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        fields["content"] = [kind | {"text": item.content}]
    if item.type == "message":
        fields.setdefault("status", "completed")
    return {"id": f"item_{fallback_id}", **fields}


def _given_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def stored_items(items: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Stored items of earlier turns, as they were listed."""
    return msgspec.convert(known_part(list(items), list[InputItem], []), list[InputItem])


def without_oldest(items: Sequence[InputItem]) -> list[InputItem]:
    """The conversation without its oldest item, and without results whose call is gone; messages of
    operators stay.

    It is empty where nothing would be left to answer.
    """
    oldest = next(
        (i for i, item in enumerate(items) if item.role not in ("system", "developer")), len(items)
    )
    kept = [*items[:oldest], *items[oldest + 1 :]]
    calls = {_call_id(item) for item in kept if item.type in (*CALLS, *HOSTED_CALLS)}
    kept = [
        item
        for item in kept
        if item.type not in (*OUTPUTS, *HOSTED_OUTPUTS) or _call_id(item) in calls
    ]
    return kept if any(item.role not in ("system", "developer") for item in kept) else []


def add_item(messages: list[ChatMessage], item: InputItem, at: str, tools: ResponseTools) -> None:
    """Adds an item to the messages; `tools` are the request's tools. Reasoning, text and calls of
    the assistant without other messages in between become one message. Raises `BadRequest`."""
    match item.type:
        case "message":
            _add_message(messages, item, at)
        case "reasoning":
            answer = _assistant(messages)
            name, thoughts = (
                ("content", item.content) if item.content else ("summary", item.summary or "")
            )
            answer.reasoning_content += _text(thoughts, f"{at}.{name}")
        case "function_call" | "custom_tool_call":
            name = given(f"{at}.name", item.name, "the name of a tool")
            call_id = given(f"{at}.call_id", item.call_id, "the id of a call")
            _assistant(messages).tool_calls.add(
                id=call_id, name=tools.name_of(item.namespace, name), **_arguments(item, at)
            )
        case "function_call_output" | "custom_tool_call_output":
            call_id = given(f"{at}.call_id", item.call_id, "the id of a call")
            text = _text(_parts(item.output, f"{at}.output"), f"{at}.output")
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=call_id))
        case _:
            _add_hosted(messages, item, at)


def _add_message(messages: list[ChatMessage], item: InputItem, at: str) -> None:
    check_role(role := given(f"{at}.role", item.role, ", ".join(ROLES)), at)
    text = _text(item.content, f"{at}.content")
    if role == "assistant":
        answer = _assistant(messages)
        answer.content = answer.content + text
    else:
        messages.append(ChatMessage(role=role, content=text))


def _add_hosted(messages: list[ChatMessage], item: InputItem, at: str) -> None:
    """Adds an item of a hosted tool. What a client ran is a call and its result; all others are
    passed over."""
    if (field := HOSTED_CALLS.get(item.type)) is not None:
        _assistant(messages).tool_calls.add(
            id=_call_id(item),
            name=item.type.removesuffix("_call"),
            arguments=_as_text(getattr(item, field)),
        )
    elif item.type in HOSTED_OUTPUTS:
        messages.append(
            ChatMessage(role="tool", content=_as_text(item.output), tool_call_id=_call_id(item))
        )
    elif item.type in PASSED_OVER:
        note("hosted item passed over", item.type, type=item.type)
    else:
        raise BadRequest.of(f"{at}.type", item.type, ITEM_TYPES)


def _call_id(item: InputItem) -> str:
    """Id of a call, of its result as well. A result of `local_shell` has it as its own id."""
    return item.call_id or item.id or ""


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _arguments(item: InputItem, at: str) -> dict[str, str]:
    """Arguments of an earlier call, as the model wrote them: they may be cut."""
    if item.type == "custom_tool_call":
        return {"input": given(f"{at}.input", item.input, "a string")}
    arguments = item.arguments
    if arguments is not None and not isinstance(arguments, str):
        raise BadRequest.of(f"{at}.arguments", arguments, "a string")
    return {"arguments": arguments or "{}"}


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content=""))
    return messages[-1]


def _parts(value: Any, at: str) -> str | list[InputPart] | None:
    """Output of a call, checked by type."""
    if value is None or isinstance(value, str):
        return value
    try:
        return msgspec.convert(known_part(value, list[InputPart], []), list[InputPart])
    except msgspec.ValidationError:
        raise BadRequest.of(at, value, TEXT) from None


def _text(content: str | list[InputPart] | None, at: str) -> str:
    if content is None:
        raise missing(at, TEXT)
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise BadRequest.of(f"{at}[{i}].type", part.type, "input_text or output_text")
        if part.text is None and part.refusal is None:
            raise missing(f"{at}[{i}].text", "a string")
    return "\n".join(part.refusal or part.text or "" for part in content)
