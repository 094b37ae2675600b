"""Turns of Anthropic's messages to the contract's messages.

A tool's result, which is a block of a user's message, becomes a message of its own, so that numbers
of messages differ; `Turns.renamed` has the client's names of fields.
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
        """Whether the last message is the beginning of the answer, which goes on with it."""
        last = self._messages[-1]
        is_begun = last.role == "assistant" and bool(last.content or last.parts)
        return is_begun and not last.tool_calls

    def _add(self, message: Message, at: str) -> None:
        check_role(message.role, at, ROLES)
        if message.role == "system":
            self._add_system(message.content, f"{at}.content")
        elif isinstance(message.content, str):
            self._append(ChatMessage(role=message.role, content=message.content), at)
        elif message.role == "user":
            self._add_user(message.content, at)
        else:
            self._add_assistant(message.content, at)

    def _add_system(self, content: str | Sequence[TextBlock], at: str) -> None:
        """Adds a system prompt, unless it is empty."""
        message = ChatMessage(role="system")
        if isinstance(content, str):
            message.content = without_attribution(content)
        else:
            texts = [_text(block, f"{at}[{k}]") for k, block in enumerate(content)]
            for text in texts:
                if rest := without_attribution(text):
                    message.parts.add(type="text", text=rest)
        if message.content or message.parts:
            self._append(message, at)

    def _add_user(self, blocks: Sequence[Block], at: str) -> None:
        """Adds a message of each run of texts, and one of each result of a tool."""
        BadRequest.unless(blocks, f"{at}.content", [], "a string or at least one block")
        texts: ChatMessage | None = None
        for k, block in enumerate(blocks):
            place = f"{at}.content[{k}]"
            match block.type:
                case "text":
                    if texts is None:
                        texts = self._append(ChatMessage(role="user"), at)
                    texts.parts.add(type="text", text=_text(block, place))
                case "tool_result":
                    texts = None
                    self._append(_result(block, place), place)
                case _:
                    raise BadRequest.of(f"{place}.type", block.type, OF_USERS)

    def _add_assistant(self, blocks: Sequence[Block], at: str) -> None:
        message = self._append(ChatMessage(role="assistant"), at)
        number = len(self._messages) - 1
        thoughts: list[str] = []
        for k, block in enumerate(blocks):
            place = f"{at}.content[{k}]"
            match block.type:
                case "text":
                    message.parts.add(type="text", text=_text(block, place))
                case "thinking":
                    thoughts.append(given(f"{place}.thinking", block.thinking, "a string"))
                case "redacted_thinking":
                    # Only the server that wrote it can read it.
                    continue
                case "tool_use":
                    call = f"messages[{number}].tool_calls[{len(message.tool_calls)}]"
                    self.renamed[f"{call}.function.arguments"] = f"{place}.input"
                    _add_call(message, block, place)
                case _:
                    raise BadRequest.of(f"{place}.type", block.type, OF_ASSISTANTS)
        if thoughts:
            message.reasoning_content = "\n".join(thoughts)

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
