"""Messages and tools of Ollama's API to the contract's."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import product

import msgspec

from headwater.proto.common_pb2 import ChatMessage, Tool, ToolCall
from headwater.proto.processor_pb2 import Conversation
from headwater.services.runtime.message_roles import check_role
from headwater.services.runtime.request_limits import MAX_MESSAGE_PARTS, bounded_tools, check_count

from . import schema

ROLES = ("system", "user", "assistant", "tool")


def conversation_to_pb(
    messages: Sequence[schema.Message], tools: Sequence[schema.Tool] | None
) -> Conversation:
    """Raises `BadRequest`."""
    num_calls = sum(len(message.tool_calls or ()) for message in messages)
    check_count("messages", len(messages) + num_calls, MAX_MESSAGE_PARTS)
    conversation = Conversation(tools=bounded_tools(map(_tool_to_pb, tools or ())))
    ids = _CallIds()
    for i, message in enumerate(messages):
        check_role(message.role, f"messages[{i}]", ROLES)
        conversation.messages.append(_message_to_pb(message, ids))
    final = conversation.messages[-1]
    # The last message is the beginning of the answer.
    if final.role == "assistant" and final.content and not final.tool_calls:
        conversation.continue_final_message = True
    return conversation


class _CallIds:
    """Ids of calls, for templates that write them: Ollama's clients may leave them out. A result
    belongs to the oldest call without a result, of the tool that it names."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._without_result: dict[int, str] = {}
        """Ids of calls, by their numbers."""
        self._numbers = defaultdict[tuple[str | None, str | None], deque[int]](deque)
        """Numbers of calls by name and id, each of which a result may leave out. Those with a
        result are among them until they are the first."""

    def of_call(self, call: schema.ToolCall) -> str:
        # Nine letters and digits, as Mistral's templates want.
        call_id = call.id or f"call{self._num_calls:05}"
        self._without_result[self._num_calls] = call_id
        for key in product((None, call.function.name), (None, call_id)):
            self._numbers[key].append(self._num_calls)
        self._num_calls += 1
        return call_id

    def of_result(self, message: schema.Message) -> str | None:
        numbers = self._numbers.get((message.tool_name, message.tool_call_id), deque())
        while numbers:
            call_id = self._without_result.pop(numbers.popleft(), None)
            if call_id is not None:
                return call_id
        return message.tool_call_id


def _message_to_pb(message: schema.Message, ids: _CallIds) -> ChatMessage:
    is_result = message.role == "tool"
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.tool_name if is_result else None,
        tool_call_id=ids.of_result(message) if is_result else None,
        reasoning_content=message.thinking or None,
        tool_calls=[_call_to_pb(call, ids) for call in message.tool_calls or ()],
    )


def _call_to_pb(call: schema.ToolCall, ids: _CallIds) -> ToolCall:
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return ToolCall(id=ids.of_call(call), name=call.function.name, arguments=arguments)


def _tool_to_pb(tool: schema.Tool) -> Tool:
    function = tool.function
    parameters = function.parameters
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters_json="" if parameters is None else msgspec.json.encode(parameters).decode(),
    )
