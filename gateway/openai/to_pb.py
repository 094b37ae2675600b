"""OpenAI's fields to the stages' messages. Fields that a client left out stay absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from .response_schema import ToolFields
from .schema import (
    Answering,
    ChatCompletionRequest,
    ContentPart,
    CustomFormat,
    CustomTool,
    Function,
    Message,
    NamedTool,
    Sampling,
    Speculative,
    StreamOptions,
    TextGrammar,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
    ToolName,
)

_OTHERS = ("stop", "logit_bias", "truncate_prompt_tokens", "thinking_token_budget", "speculative")
_SCALARS = tuple(name for name in Sampling.__struct_fields__ if name not in _OTHERS)
_VALUES = attrgetter(*_SCALARS)
MAX_TOKEN_ID = 2**32 - 1
UNLIMITED = -1
CHAT_ROLES = (*ROLES, "function")
"""Roles that a chat may have. The contract has messages of functions as results of tools."""
TOOL_CHOICES = ("auto", "none", "required")


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
                _tool_to_pb(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())
            ),
        ),
        add_special_tokens=asked.add_special_tokens,
    )
    conversation = prompt.conversation
    # One by one: a list of all messages would be copied in one long native call.
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
    answering.MergeFrom(_tool_choice(asked))
    return answering


def _tool_choice(asked: ChatCompletionRequest) -> processor_pb2.Conversation:
    """Tool choice by a tool's name, or by a word with the tools that it allows where these are not
    all."""
    choice = asked.tool_choice
    if not isinstance(choice, ToolChoice):
        return processor_pb2.Conversation(tool_choice=tool_choice_word(choice))
    kinds = {_name_of(tool, ""): tool.type for tool in asked.tools or ()}
    if choice.type != "allowed_tools":
        name = offered_as(choice.type, _name_of(choice, "tool_choice"), "tool_choice", kinds)
        return processor_pb2.Conversation(tool_choice=name, tool_choice_is_name=True)
    allowed = given("tool_choice.allowed_tools", choice.allowed_tools)
    tools = [
        (f"tool_choice.allowed_tools.tools[{i}]", tool) for i, tool in enumerate(allowed.tools)
    ]
    names = [offered_as(tool.type, _name_of(tool, at), at, kinds) for at, tool in tools]
    return processor_pb2.Conversation(tool_choice=allowed.mode, allowed_tools=names)


def offered_as(kind: str, name: str, at: str, kinds: Mapping[str, str]) -> str:
    """Name of an offered tool in the contract; an unknown name is left for the contract to refuse.
    `kinds`: types of the offered tools, by name."""
    if kinds.get(name, kind) != kind:
        raise BadRequest.of(f"{at}.type", kind, f"{kinds[name]}, which {name!r} is")
    return name


def _name_of(tool: Tool | NamedTool | ToolChoice, at: str) -> str:
    named: CustomTool | Function | ToolName | None = (
        tool.custom if tool.type == "custom" else tool.function
    )
    return given(f"{at}.{tool.type}", None if named is None else named.name)


def tool_choice_word(choice: str | None) -> str | None:
    """Maps a tool choice to the contract's word. The contract takes words and names of tools, so an
    unknown word is refused."""
    if choice is not None and choice not in TOOL_CHOICES:
        raise BadRequest.of(
            "tool_choice", choice, "auto, none, required, or an object that names functions"
        )
    return choice


def _tool_to_pb(tool: Tool, at: str) -> common_pb2.Tool:
    if tool.type == "function":
        function = given(f"{at}.function", tool.function)
        return function_to_pb(function, function.name, function.description)
    custom = given(f"{at}.custom", tool.custom)
    return common_pb2.Tool(
        name=custom.name,
        description=custom.description or "",
        custom_input=text_to_pb(_grammar_of(custom.format, f"{at}.custom.format")),
    )


def function_to_pb(
    function: Function | ToolFields, name: str, description: str | None
) -> common_pb2.Tool:
    return common_pb2.Tool(
        name=name,
        description=description or "",
        parameters_json=""
        if function.parameters is None
        else msgspec.json.encode(function.parameters).decode(),
        strict=function.strict,
    )


def _grammar_of(form: CustomFormat | None, at: str) -> TextGrammar | None:
    if form is None or form.type == "text":
        return None
    return given(f"{at}.grammar", form.grammar)


def text_to_pb(grammar: TextGrammar | None) -> common_pb2.CustomInput:
    """Text that a custom tool takes; without a grammar any text."""
    return common_pb2.CustomInput(
        **({} if grammar is None else {grammar.syntax: grammar.definition})
    )


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
        custom = given(f"{at}.custom", call.custom)
        return common_pb2.ToolCall(id=call.id, name=custom.name, input=custom.input)
    function = given(f"{at}.function", call.function)
    return common_pb2.ToolCall(id=call.id, name=function.name, arguments=function.arguments or "")


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise BadRequest("stream_options", "stream_options without stream; allowed: with stream")
