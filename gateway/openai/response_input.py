"""Converts the items of a response's conversation to messages, and the rest of the request to the
stages' contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headwater.proto import common_pb2, processor_pb2
from headwater.proto.common_pb2 import ChatMessage
from headwater.services.runtime.errors import BadRequest, UnsupportedField
from headwater.services.runtime.json_limits import check_json
from headwater.services.runtime.message_roles import ROLES, check_role
from headwater.services.runtime.request_limits import bounded_tools

from .body import known_part
from .response_schema import InputItem, InputPart, ResponsesRequest, ResponseTool, TextOptions
from .schema import TextGrammar
from .structured_output import Asked, only_constraint, structured_outputs_to_pb, whitespace_of
from .to_pb import (
    function_to_pb,
    given,
    missing,
    offered_as,
    sampling_to_pb,
    text_to_pb,
    tool_choice_word,
)

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
ITEM_TYPES = (
    "message, function_call, function_call_output, custom_tool_call, "
    "custom_tool_call_output or reasoning"
)
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
LOGPROBS = "message.output_text.logprobs"
STRUCTURED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include` that clients may ask for; reasoning is never encrypted here, so that asking
for it changes nothing."""


def check(asked: ResponsesRequest) -> None:
    """Checks a request as far as no processor is needed. Raises `BadRequest`."""
    if asked.prompt:
        raise UnsupportedField("prompt", "there are no stored prompts")
    if asked.background and asked.store is False:
        raise BadRequest(
            "store",
            "store is false with background; allowed: true, a client comes back for the answer",
        )
    if asked.background and asked.stream_options is not None and asked.stream_options.resumable:
        raise BadRequest(
            "stream_options.resumable", "stream_options.resumable with background; allowed: without"
        )
    for name in ("n", "best_of"):
        if getattr(asked, name) not in (None, 1):
            raise BadRequest.of(name, getattr(asked, name), "1, a response is one answer")
    if asked.conversation is not None and asked.previous_response_id is not None:
        raise BadRequest(
            "conversation", "conversation beside previous_response_id; allowed: one of them"
        )
    if (
        asked.conversation is not None
        and asked.stream_options is not None
        and asked.stream_options.resumable
    ):
        raise BadRequest(
            "stream_options.resumable",
            "stream_options.resumable with conversation; allowed: without",
        )
    if asked.prompt_logprobs is not None:
        raise UnsupportedField(
            "prompt_logprobs", "/v1/chat/completions and /v1/completions tell them"
        )
    for i, name in enumerate(asked.include or ()):
        if name not in INCLUDED:
            raise BadRequest.of(f"include[{i}]", name, " or ".join(INCLUDED))
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options", "stream_options without stream; allowed: with stream")
    if not asked.input:
        raise BadRequest.of("input", asked.input, "a string or a list of items, not empty")


def names_of(asked: ResponsesRequest) -> dict[str, str]:
    """Client's names of fields that the contract has under other names."""
    renamed = {
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }
    # vLLM's name for it is served too.
    if asked.max_output_tokens is not None or asked.max_tokens is None:
        renamed["max_tokens"] = "max_output_tokens"
    if asked.structured_outputs is None:
        renamed |= {
            "structured_output.json_schema": "text.format.schema",
            "structured_output.json_object": "text.format",
        }
    else:
        kinds = {"json_schema": "json"}
        renamed |= {
            f"structured_output.{kind}": f"structured_outputs.{kinds.get(kind, kind)}"
            for kind in STRUCTURED_KINDS
        }
        renamed["whitespace_pattern"] = "structured_outputs.whitespace_pattern"
    for i in range(len(asked.tools or ())):
        renamed |= {
            f"tools[{i}].{kind}.name": f"tools[{i}].name" for kind in ("function", "custom")
        }
        renamed[f"tools[{i}].function.parameters"] = f"tools[{i}].parameters"
        renamed[f"tools[{i}].custom.format.grammar.definition"] = f"tools[{i}].format.definition"
    return renamed


def items_of(asked: ResponsesRequest) -> list[InputItem]:
    """Items that the client sent in this turn."""
    if isinstance(asked.input, str):
        return [InputItem(role="user", content=asked.input)]
    return asked.input


def check_items(items: Sequence[InputItem], name: str) -> None:
    """Checks items of a conversation; `name` is the list's. Raises `BadRequest`."""
    messages: list[ChatMessage] = []
    for position, item in enumerate(items):
        _add(messages, item, f"{name}[{position}]")


def as_item(item: InputItem, fallback_id: str) -> dict[str, Any]:
    """An item as it is listed: with an id, and text in parts."""
    fields: dict[str, Any] = _said_fields(msgspec.to_builtins(item))
    for name in ("content", "output", "summary"):
        if isinstance(fields.get(name), list):
            fields[name] = [_said_fields(part) for part in fields[name]]
    if item.type == "message" and isinstance(item.content, str):
        is_said = item.role == "assistant"
        kind = {"type": "output_text", "annotations": []} if is_said else {"type": "input_text"}
        fields["content"] = [kind | {"text": item.content}]
    if item.type == "message":
        fields.setdefault("status", "completed")
    return {"id": f"item_{fallback_id}", **fields}


def _said_fields(fields: dict[str, Any]) -> dict[str, Any]:
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
    calls = {item.call_id for item in kept if item.type in CALLS}
    kept = [item for item in kept if item.type not in OUTPUTS or item.call_id in calls]
    return kept if any(item.role not in ("system", "developer") for item in kept) else []


def to_prompt(
    asked: ResponsesRequest, items: Sequence[InputItem], *, first: int
) -> processor_pb2.Prompt:
    """Prompt of the conversation. `items` is the whole conversation; the client sent those from
    `first` on in this turn."""
    messages = (
        [ChatMessage(role="system", content=asked.instructions)] if asked.instructions else []
    )
    for position, item in enumerate(items):
        _add(messages, item, _place(asked, position, first))
    conversation = processor_pb2.Conversation(
        messages=messages,
        tools=bounded_tools(_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())),
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning_effort=asked.reasoning.effort if asked.reasoning is not None else None,
        verbosity=asked.text.verbosity if asked.text is not None else None,
    )
    conversation.MergeFrom(_tool_choice(asked))
    if asked.chat_template_kwargs is not None:
        conversation.chat_template_kwargs_json = msgspec.json.encode(
            asked.chat_template_kwargs
        ).decode()
    return processor_pb2.Prompt(conversation=conversation)


def _place(asked: ResponsesRequest, position: int, first: int) -> str:
    """Name of an item of the whole conversation, of which the client sent those from `first` on in
    this turn."""
    if position >= first:
        return f"input[{position - first}]"
    return f"{'previous_response_id' if asked.conversation is None else 'conversation'}.items[{position}]"


def to_sampling(asked: ResponsesRequest) -> common_pb2.Sampling:
    sampling = sampling_to_pb(asked)
    if asked.max_output_tokens is not None:
        sampling.max_tokens = asked.max_output_tokens
    if LOGPROBS in (asked.include or ()) or asked.top_logprobs is not None:
        sampling.logprobs = True
        sampling.top_logprobs = asked.top_logprobs or 0
    found = [*_of_text_format(asked.text), *structured_outputs_to_pb(asked.structured_outputs)]
    if found:
        _, output = only_constraint(found)
        if (whitespace := whitespace_of(asked.structured_outputs)) is not None:
            output.whitespace_pattern = whitespace
        sampling.structured_output.CopyFrom(output)
    return sampling


def _of_text_format(text: TextOptions | None) -> Iterator[Asked]:
    form = text.format if text is not None else None
    if form is not None and form.type == "json_object":
        yield "text.format", common_pb2.StructuredOutput(json_object=True)
    elif form is not None and form.type == "json_schema":
        asked = given("text.format.schema", form.schema, "a JSON Schema, with type json_schema")
        schema = msgspec.json.encode(asked).decode()
        yield (
            "text.format.schema",
            common_pb2.StructuredOutput(json_schema=schema, strict=form.strict),
        )


def _add(messages: list[ChatMessage], item: InputItem, at: str) -> None:
    """Adds an item to the messages. Reasoning, text and calls of the assistant without other
    messages in between become one message."""
    match item.type:
        case "message":
            check_role(role := given(f"{at}.role", item.role, ", ".join(ROLES)), at)
            text = _text(item.content, f"{at}.content")
            if role == "assistant":
                said = _assistant(messages)
                said.content = said.content + text
            else:
                messages.append(ChatMessage(role=role, content=text))
        case "reasoning":
            said = _assistant(messages)
            name, thoughts = (
                ("content", item.content) if item.content else ("summary", item.summary or "")
            )
            said.reasoning_content += _text(thoughts, f"{at}.{name}")
        case "function_call" | "custom_tool_call":
            name = given(f"{at}.name", item.name, "the name of a tool")
            call_id = given(f"{at}.call_id", item.call_id, "the id of a call")
            _assistant(messages).tool_calls.add(id=call_id, name=name, **_said(item, at))
        case "function_call_output" | "custom_tool_call_output":
            call_id = given(f"{at}.call_id", item.call_id, "the id of a call")
            text = _text(item.output, f"{at}.output")
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=call_id))
        case _:
            raise BadRequest.of(f"{at}.type", item.type, ITEM_TYPES)


def _said(item: InputItem, at: str) -> dict[str, str]:
    """Arguments of an earlier call."""
    if item.type == "custom_tool_call":
        return {"input": given(f"{at}.input", item.input)}
    check_json((item.arguments or "").encode(), f"{at}.arguments")
    try:
        msgspec.json.decode(arguments := item.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        raise BadRequest.of(f"{at}.arguments", item.arguments, "a JSON object") from None
    return {"arguments": arguments}


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant", content=""))
    return messages[-1]


def _text(content: str | list[InputPart] | None, at: str) -> str:
    if content is None:
        raise missing(at, "a string or a list of text parts")
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise BadRequest.of(f"{at}[{i}].type", part.type, "input_text or output_text")
        if part.text is None and part.refusal is None:
            raise missing(f"{at}[{i}].text", "a string")
    return "\n".join(part.refusal or part.text or "" for part in content)


def _tool(tool: ResponseTool, at: str) -> common_pb2.Tool:
    if tool.type == "function":
        return function_to_pb(tool)
    form = tool.format
    grammar = None
    if form is not None and form.type == "grammar":
        definition = given(f"{at}.format.definition", form.definition)
        grammar = TextGrammar(
            definition=definition, syntax=given(f"{at}.format.syntax", form.syntax)
        )
    return common_pb2.Tool(
        name=tool.name, description=tool.description or "", custom_input=text_to_pb(grammar)
    )


def _tool_choice(asked: ResponsesRequest) -> processor_pb2.Conversation:
    """Tool choice by a tool's name, or by a word with the tools that it allows where these are not
    all."""
    choice = asked.tool_choice
    if isinstance(choice, str) or choice is None:
        # Clients send `auto` whether or not they have tools.
        word = tool_choice_word(choice) if asked.tools or choice != "auto" else None
        return processor_pb2.Conversation(tool_choice=word)
    kinds = {tool.name: tool.type for tool in asked.tools or ()}
    if choice.type != "allowed_tools":
        name = offered_as(choice.type, given("tool_choice.name", choice.name), "tool_choice", kinds)
        return processor_pb2.Conversation(tool_choice=name, tool_choice_is_name=True)
    allowed = enumerate(given("tool_choice.tools", choice.tools))
    names = [
        offered_as(tool.type, tool.name, f"tool_choice.tools[{i}]", kinds) for i, tool in allowed
    ]
    return processor_pb2.Conversation(
        tool_choice=given("tool_choice.mode", choice.mode), allowed_tools=names
    )
