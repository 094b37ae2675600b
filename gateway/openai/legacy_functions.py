"""Converts `functions` and `function_call`, the predecessors of `tools` and `tool_choice`, to
these, and answers back.

OpenAI still serves them, and older clients still send them. An answer has one call at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headwater.services.runtime.errors import BadRequest

from ..request.sinks import CallPiece
from .schema import (
    ChatCompletionRequest,
    FunctionCall,
    LegacyCall,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)

WORDS = ("auto", "none")
_NEWER = {"functions": "tools", "function_call": "tool_choice"}


def is_legacy(asked: ChatCompletionRequest) -> bool:
    """Whether calls are requested, and so answered, under the old names."""
    return asked.functions is not None or asked.function_call is not None


def with_tools(asked: ChatCompletionRequest) -> ChatCompletionRequest:
    """The request with today's fields. Raises `BadRequest` for both kinds at once."""
    if not is_legacy(asked):
        return asked
    for old, new in _NEWER.items():
        if getattr(asked, new) is not None:
            given = next(name for name in _NEWER if getattr(asked, name) is not None)
            raise BadRequest(
                new, f"{new} beside {given}; allowed: one of them, {old} has become {new}"
            )
    choice = asked.function_call
    functions = asked.functions or ()
    if isinstance(choice, str) and choice not in WORDS:
        raise BadRequest.of("function_call", choice, "auto, none, or an object with a name")
    if choice is not None and not functions:
        raise BadRequest(
            "function_call", "function_call without functions; allowed: with functions"
        )
    named = choice if isinstance(choice, ToolName) else None
    return msgspec.structs.replace(
        asked,
        tools=[Tool(function=function) for function in functions],
        tool_choice=ToolChoice(function=named) if named is not None else choice,
        parallel_tool_calls=False,
        functions=None,
        function_call=None,
    )


def with_tool_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with today's fields: earlier calls have ids, by which their results are
    found."""
    if not any(
        message.function_call is not None or message.role == "function" for message in messages
    ):
        return messages
    ids: dict[str, str] = {}
    """Id of the last call by the name of its function."""
    return [_newer(message, i, ids) for i, message in enumerate(messages)]


def _newer(message: Message, i: int, ids: dict[str, str]) -> Message:
    call = message.function_call
    if message.role == "function":
        call_id = ids.get(message.name or "", f"call_{i}")
        return msgspec.structs.replace(message, role="tool", tool_call_id=call_id)
    if call is None or not (call.name or call.arguments):
        return message
    ids[call.name] = f"call_{i}"
    return msgspec.structs.replace(
        message, tool_calls=[_tool_call(call, message, i)], function_call=None
    )


def _tool_call(call: LegacyCall, message: Message, i: int) -> ToolCall:
    at = f"messages[{i}].function_call"
    if not call.name:
        raise BadRequest(
            f"{at}.name", f"{at}.name is missing; allowed: a function's name", code="missing_field"
        )
    if message.tool_calls:
        raise BadRequest(at, f"{at} beside tool_calls; allowed: one of them")
    return ToolCall(id=f"call_{i}", function=FunctionCall(name=call.name, arguments=call.arguments))


def old_names(asked: ChatCompletionRequest) -> dict[str, str]:
    """Client's old names of fields, by the contract's names."""
    if not is_legacy(asked):
        return {}
    names = {"tools": "functions", "tool_choice": "function_call"}
    for i in range(len(asked.functions or ())):
        names |= {
            f"tools[{i}].function.{part}": f"functions[{i}].{part}"
            for part in ("name", "parameters")
        }
    return names


def legacy_call(calls: Sequence[CallPiece]) -> dict[str, Any]:
    """`function_call` of a message or a delta: a call's first delta has its name."""
    call = calls[0]
    return {**({"name": call.name} if call.name else {}), "arguments": "".join(call.arguments)}


def legacy_finish_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
