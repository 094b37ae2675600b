"""Prompts and conversations in Python to the stages' messages. Conversations are lists of messages
as OpenAI's chat has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwater.proto import common_pb2, processor_pb2

from ..runtime.errors import BadRequest
from ..runtime.message_roles import check_role

TextOrIds = str | Sequence[int]
"""Prompt as text, or as token ids."""
Message = Mapping[str, Any]
_MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_MESSAGE_FIELDS |= {"reasoning_content", "reasoning"}


def prompts_of(given: TextOrIds | Sequence[TextOrIds]) -> list[TextOrIds]:
    """List of prompts, of one prompt or several."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]  # type: ignore[list-item] # a list of numbers is one prompt
    return list(given)  # type: ignore[arg-type]


def conversations_of(
    given: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """List of conversations, of one conversation or several."""
    if given and isinstance(given[0], Mapping):
        return [given]  # type: ignore[list-item] # a list of messages is one conversation
    return list(given)  # type: ignore[arg-type]


def prompt_to_pb(prompt: TextOrIds) -> processor_pb2.Prompt:
    """Raises `BadRequest`."""
    if isinstance(prompt, str):
        return processor_pb2.Prompt(text=prompt)
    try:
        return processor_pb2.Prompt(token_ids=processor_pb2.Prompt.TokenIds(ids=prompt))
    except (TypeError, ValueError):
        raise BadRequest.of("prompt", prompt, "text or a list of token ids") from None


def conversation_to_pb(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> processor_pb2.Prompt:
    """`tool_choice` is `auto`, `none`, `required` or a tool's name. Raises `BadRequest`."""
    conversation = processor_pb2.Conversation(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())],
        tool_choice=tool_choice,
        chat_template=chat_template,
        reasoning_effort=reasoning_effort,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    if chat_template_kwargs:
        conversation.chat_template_kwargs_json = json.dumps(chat_template_kwargs)
    return processor_pb2.Prompt(conversation=conversation)


def _message(message: Message, at: str) -> common_pb2.ChatMessage:
    _check_names(message, _MESSAGE_FIELDS, at)
    content = message.get("content")
    role = str(message.get("role"))
    check_role(role, at)
    return common_pb2.ChatMessage(
        role=role,
        content=content if isinstance(content, str) else None,
        parts=() if isinstance(content, str) else _parts(content or (), f"{at}.content"),
        name=message.get("name"),
        tool_calls=[_call(call) for call in message.get("tool_calls") or ()],
        tool_call_id=message.get("tool_call_id"),
        reasoning_content=message.get("reasoning_content") or message.get("reasoning"),
    )


def _parts(content: Iterable[Mapping[str, Any]], at: str) -> list[common_pb2.ContentPart]:
    for i, part in enumerate(content):
        _check_names(part, {"type", "text"}, f"{at}[{i}]")
    return [
        common_pb2.ContentPart(type=part.get("type", ""), text=part.get("text", ""))
        for part in content
    ]


def _call(call: Mapping[str, Any]) -> common_pb2.ToolCall:
    function = call.get("function", {})
    arguments = function.get("arguments", "")
    return common_pb2.ToolCall(
        id=call.get("id", ""),
        name=function.get("name", ""),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _tool(tool: Mapping[str, Any], at: str) -> common_pb2.Tool:
    BadRequest.unless(tool.get("type") == "function", f"{at}.type", tool.get("type"), "function")
    function = tool.get("function", {})
    _check_names(function, {"name", "description", "parameters", "strict"}, f"{at}.function")
    parameters = function.get("parameters")
    return common_pb2.Tool(
        name=function.get("name", ""),
        description=function.get("description") or "",
        parameters_json="" if parameters is None else json.dumps(parameters),
        strict=function.get("strict"),
    )


def _check_names(given: Mapping[str, Any], known: set[str], at: str) -> None:
    """Raises `BadRequest` for a name that is not known."""
    for name in given:
        if name not in known:
            raise BadRequest(
                f"{at}.{name}",
                f"{at}.{name} is not known; allowed: {', '.join(sorted(known))}",
                code="unknown_field",
            )
