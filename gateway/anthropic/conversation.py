"""Turns of Anthropic's messages to the contract's messages.

A tool's result, which is a block of a user's message, becomes a message of its own, and messages of
one role in a row become one. So numbers of messages differ; `Turns.renamed` has the client's names
of fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.proto import processor_pb2
from headwater.proto.common_pb2 import ChatMessage
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.message_roles import check_role
from headwater.services.runtime.request_limits import MAX_MESSAGE_PARTS, check_count

from ..wire.required import given
from .attribution import without_attribution
from .schema import Block, CountTokensRequest, Message, TextBlock

ROLES = ("user", "assistant", "system")
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""Form of a system message after the first turn, as coding agents themselves have it in the turns
of users."""
OF_USERS = "text or tool_result (only text is served)"
OF_ASSISTANTS = "text, thinking, redacted_thinking or tool_use"


class Turns:
    """The contract's messages of a request, which are added to a conversation."""

    def __init__(self, conversation: processor_pb2.Conversation) -> None:
        self._messages = conversation.messages
        self.renamed: dict[str, str] = {}
        """Client's names of fields, by the contract's names."""

    def add_all(self, asked: CountTokensRequest) -> None:
        """Raises `BadRequest`."""
        check_count("messages", _num_parts(asked), MAX_MESSAGE_PARTS)
        if asked.system is not None:
            self._add_system(asked.system, "system")
        for i, message in enumerate(asked.messages):
            self._add(message, f"messages[{i}]")

    @property
    def ends_in_answer(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self._messages[-1]
        return last.role == "assistant" and bool(last.parts) and not last.tool_calls

    def _add(self, message: Message, at: str) -> None:
        check_role(message.role, at, ROLES)
        if message.role == "system":
            self._add_system(message.content, f"{at}.content")
        elif isinstance(message.content, str):
            self._turn(message.role, at).parts.add(type="text", text=message.content)
        elif message.role == "user":
            self._add_user(message.content, at)
        else:
            self._add_assistant(message.content, at)

    def _add_system(self, content: str | Sequence[TextBlock], at: str) -> None:
        """Adds a system prompt, unless it is empty. Most templates take one at the beginning alone,
        and some take no two turns of users in a row: a later one is a part of a user's turn."""
        if isinstance(content, str):
            texts = [content]
        else:
            texts = [_text(block, f"{at}[{k}]") for k, block in enumerate(content)]
        is_first = not self._messages or self._messages[-1].role == "system"
        for text in filter(None, map(without_attribution, texts)):
            turn = self._turn("system" if is_first else "user", at.removesuffix(".content"))
            turn.parts.add(type="text", text=text if is_first else REMINDER.format(text))

    def _add_user(self, blocks: Sequence[Block], at: str) -> None:
        """Adds texts to a turn, and a message of each result of a tool."""
        BadRequest.unless(blocks, f"{at}.content", [], "a string or at least one block")
        for k, block in enumerate(blocks):
            place = f"{at}.content[{k}]"
            match block.type:
                case "text":
                    text = _text(block, place)
                    self._turn("user", at).parts.add(type="text", text=text)
                case "tool_result":
                    self._append(_result(block, place), place)
                case _:
                    raise BadRequest.of(f"{place}.type", block.type, OF_USERS)

    def _add_assistant(self, blocks: Sequence[Block], at: str) -> None:
        message = self._turn("assistant", at)
        thoughts = [message.reasoning_content]
        for k, block in enumerate(blocks):
            place = f"{at}.content[{k}]"
            match block.type:
                case "text":
                    message.parts.add(type="text", text=_text(block, place))
                case "thinking":
                    thoughts.append(given(f"{place}.thinking", block.thinking, "a string"))
                case "redacted_thinking":
                    # Only the server that encrypted it can read it.
                    continue
                case "tool_use":
                    call = f"messages[{len(self._messages) - 1}].tool_calls"
                    arguments = f"{call}[{len(message.tool_calls)}].function.arguments"
                    self.renamed[arguments] = f"{place}.input"
                    _add_call(message, block, place)
                case _:
                    raise BadRequest.of(f"{place}.type", block.type, OF_ASSISTANTS)
        if any(thoughts):
            message.reasoning_content = "\n".join(filter(None, thoughts))

    def _turn(self, role: str, at: str) -> ChatMessage:
        """The message that takes the next block: messages of one role in a row are one turn."""
        if self._messages and self._messages[-1].role == role:
            return self._messages[-1]
        return self._append(ChatMessage(role=role), at)

    def _append(self, message: ChatMessage, at: str) -> ChatMessage:
        number = len(self._messages)
        for name in ("role", "content"):
            self.renamed[f"messages[{number}].{name}"] = f"{at}.{name}"
        self._messages.append(message)
        return self._messages[number]


def _num_parts(asked: CountTokensRequest) -> int:
    """Number of messages and blocks, those of results of tools included."""
    contents = [asked.system, *(message.content for message in asked.messages)]
    blocks = [each for content in contents if isinstance(content, list) for each in content]
    results = [each.content for each in blocks if isinstance(each, Block)]
    nested = sum(len(content) for content in results if isinstance(content, list))
    return len(asked.messages) + len(blocks) + nested


def _text(block: TextBlock, at: str) -> str:
    BadRequest.unless(block.type == "text", f"{at}.type", block.type, "text")
    return given(f"{at}.text", block.text, "a string")


def _result(block: Block, at: str) -> ChatMessage:
    call_id = given(f"{at}.tool_use_id", block.tool_use_id, "the id of a call")
    content = block.content or ""
    if isinstance(content, str):
        return ChatMessage(role="tool", content=content, tool_call_id=call_id)
    message = ChatMessage(role="tool", tool_call_id=call_id)
    for k, part in enumerate(content):
        message.parts.add(type="text", text=_text(part, f"{at}.content[{k}]"))
    return message


def _add_call(message: ChatMessage, block: Block, at: str) -> None:
    arguments = given(f"{at}.input", block.input, "an object")
    message.tool_calls.add(
        id=given(f"{at}.id", block.id, "the id of the call"),
        name=given(f"{at}.name", block.name, "the name of a tool"),
        arguments=msgspec.json.encode(arguments).decode(),
    )
