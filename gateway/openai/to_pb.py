"""OpenAI's fields to the stages' messages. Fields that a client left out stay absent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not

import msgspec

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest, UnsupportedField
from headwater.services.runtime.message_roles import ROLES, check_role
from headwater.services.runtime.request_limits import (
    MAX_MESSAGE_PARTS,
    WHAT_FITS,
    bounded_tools,
    check_count,
)

from ..wire.required import given
from .legacy_functions import with_tool_calls
from .not_served import NOT_SERVED
from .schema import (
    Answering,
    ChatCompletionRequest,
    ContentPart,
    Message,
    Sampling,
    Speculative,
    StreamOptions,
    TokenizeRequest,
    ToolCall,
)
from .tools_to_pb import NAMED, tool_choice_to_pb, tool_to_pb

_OTHERS = ("stop", "logit_bias", "truncate_prompt_tokens", "thinking_token_budget", "speculative")
_SCALARS = tuple(name for name in Sampling.__struct_fields__ if name not in _OTHERS)
_VALUES = attrgetter(*_SCALARS)
MAX_TOKEN_ID = 2**32 - 1
UNLIMITED = -1
CHAT_ROLES = (*ROLES, "function")
"""Roles that a chat may have. The contract has messages of functions as results of tools."""


def sampling_to_pb(asked: Sampling) -> common_pb2.Sampling:
    """Converts the fields that chat and completions share."""
    values = _VALUES(asked)
    given = compress(zip(_SCALARS, values, strict=True), map(is_not, values, repeat(None)))
    sampling = common_pb2.Sampling(**dict(given))
    if asked.stop is not None:
        sampling.stop.extend([asked.stop] if isinstance(asked.stop, str) else asked.stop)
    if asked.truncate_prompt_tokens is not None:
        sampling.truncate_prompt_tokens = truncation_to_pb(asked.truncate_prompt_tokens)
    if asked.thinking_token_budget not in (None, UNLIMITED):
        sampling.thinking_token_budget = asked.thinking_token_budget
    if asked.speculative is not None:
        sampling.speculative.CopyFrom(_speculative_to_pb(asked.speculative))
    if isinstance(asked, Answering) and asked.no_stop_trim:
        sampling.include_stop_str_in_output = True
    for key, bias in (asked.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise BadRequest.of("logit_bias", key, "numbers by token id")
        sampling.logit_bias[int(key)] = bias
    return sampling


def _speculative_to_pb(asked: str | Speculative) -> common_pb2.Speculative:
    if isinstance(asked, str):
        return common_pb2.Speculative(mode=asked)
    return common_pb2.Speculative(
        mode=asked.mode, drafter=asked.drafter, max_tokens=asked.max_tokens
    )


def truncation_to_pb(given: int) -> int:
    """Truncation of the prompt; clients write −1 for as much as fits."""
    return WHAT_FITS if given == UNLIMITED else given


def conversation_to_pb(asked: ChatCompletionRequest | TokenizeRequest) -> processor_pb2.Prompt:
    messages = with_tool_calls(asked.messages or ())
    check_count("messages", _num_parts(messages), MAX_MESSAGE_PARTS)
    prompt = processor_pb2.Prompt(
        conversation=processor_pb2.Conversation(
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            chat_template=asked.chat_template,
            tools=bounded_tools(
                tool_to_pb(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())
            ),
        ),
        add_special_tokens=asked.add_special_tokens,
    )
    conversation = prompt.conversation
    # Messages are added one by one: a list of all would be copied in one long native call.
    for i, message in enumerate(messages):
        conversation.messages.append(_message_to_pb(message, f"messages[{i}]"))
    if isinstance(asked, ChatCompletionRequest):
        conversation.MergeFrom(_answering_to_pb(asked))
    variables = dict(asked.chat_template_kwargs or {})
    if isinstance(asked, ChatCompletionRequest) and asked.documents:
        variables["documents"] = asked.documents
    if variables:
        conversation.chat_template_kwargs_json = msgspec.json.encode(variables).decode()
    return prompt


def _num_parts(messages: Sequence[Message]) -> int:
    """Number of parts of a conversation: messages, parts of their content and calls in them."""
    lists = [
        each
        for message in messages
        for each in (message.content, message.tool_calls)
        if isinstance(each, list)
    ]
    return len(messages) + sum(map(len, lists))


def _answering_to_pb(asked: ChatCompletionRequest) -> processor_pb2.Conversation:
    """Converts the fields that say how the conversation is to be answered."""
    answering = processor_pb2.Conversation(
        parallel_tool_calls=asked.parallel_tool_calls,
        include_reasoning=asked.include_reasoning,
        reasoning_effort=asked.reasoning_effort,
        verbosity=asked.verbosity,
    )
    answering.MergeFrom(tool_choice_to_pb(asked))
    return answering


def _message_to_pb(message: Message, at: str) -> common_pb2.ChatMessage:
    check_role(message.role, at, CHAT_ROLES)
    if message.audio:
        raise UnsupportedField(f"{at}.audio", NOT_SERVED["messages[].audio"])
    content = message.content if message.content is not None else message.refusal
    parts: list[ContentPart] = content if isinstance(content, list) else []
    return common_pb2.ChatMessage(
        role=message.role,
        content=content if isinstance(content, str) else None,
        parts=[_part_to_pb(part, f"{at}.content[{k}]") for k, part in enumerate(parts)],
        name=message.name,
        tool_calls=[
            _call_to_pb(call, f"{at}.tool_calls[{k}]")
            for k, call in enumerate(message.tool_calls or ())
        ],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content or message.reasoning,
    )


def _part_to_pb(part: ContentPart, at: str) -> common_pb2.ContentPart:
    if part.type == "refusal":
        return common_pb2.ContentPart(
            type="text", text=given(f"{at}.refusal", part.refusal, "a string")
        )
    if part.type == "text":
        return common_pb2.ContentPart(type="text", text=given(f"{at}.text", part.text, "a string"))
    # The processor refuses it by its type.
    return common_pb2.ContentPart(type=part.type)


def _call_to_pb(call: ToolCall, at: str) -> common_pb2.ToolCall:
    if call.type == "custom":
        custom = given(f"{at}.custom", call.custom, NAMED)
        return common_pb2.ToolCall(id=call.id, name=custom.name, input=custom.input)
    function = given(f"{at}.function", call.function, NAMED)
    return common_pb2.ToolCall(id=call.id, name=function.name, arguments=function.arguments or "")


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise BadRequest("stream_options", "stream_options without stream; allowed: with stream")
