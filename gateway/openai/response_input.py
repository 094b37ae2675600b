"""Converts a response's request to the stages' contract. Its conversation is `response_history`'s,
its tools are `response_tools`'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from headwater.proto import common_pb2, processor_pb2
from headwater.proto.common_pb2 import ChatMessage
from headwater.services.runtime.errors import BadRequest, UnsupportedField

from ..wire.required import given
from .response_history import add_item
from .response_schema import InputItem, ResponsesRequest, TextOptions
from .response_tools import ResponseTools
from .structured_output import Asked, only_constraint, structured_outputs_to_pb, whitespace_of
from .to_pb import sampling_to_pb

LOGPROBS = "message.output_text.logprobs"
STRUCTURED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Supported values of `include`; reasoning is never encrypted here, so asking for encrypted
reasoning has no effect."""


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
            "prompt_logprobs", "/v1/chat/completions and /v1/completions return them"
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
    return renamed | ResponseTools(asked.tools).places()


def items_of(asked: ResponsesRequest) -> list[InputItem]:
    """Items that the client sent in this turn."""
    if isinstance(asked.input, str):
        return [InputItem(role="user", content=asked.input)]
    return asked.input


def to_prompt(
    asked: ResponsesRequest, items: Sequence[InputItem], *, first: int
) -> processor_pb2.Prompt:
    """Prompt of the conversation. `items` is the whole conversation; the client sent those from
    `first` on in this turn."""
    tools = ResponseTools(asked.tools)
    messages = (
        [ChatMessage(role="system", content=asked.instructions)] if asked.instructions else []
    )
    for position, item in enumerate(items):
        add_item(messages, item, _place(asked, position, first), tools)
    conversation = processor_pb2.Conversation(
        messages=messages,
        tools=tools.to_pb(),
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning_effort=asked.reasoning.effort if asked.reasoning is not None else None,
        verbosity=asked.text.verbosity if asked.text is not None else None,
    )
    conversation.MergeFrom(tools.choice_to_pb(asked))
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
    earlier = "previous_response_id" if asked.conversation is None else "conversation"
    return f"{earlier}.items[{position}]"


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
