"""A request to /api/chat or /api/generate in the contract's form. Fields that a client left out
stay absent."""

from __future__ import annotations

import msgspec

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest, UnsupportedField

from .conversation import conversation_to_pb
from .options import NAMES, options_to_pb
from .schema import Answering, ChatRequest, GenerateRequest, Message

JSON = "json"


def is_load(asked: ChatRequest | GenerateRequest) -> bool:
    """Whether the request has no prompt, and so only loads the model."""
    if isinstance(asked, ChatRequest):
        return not asked.messages
    return not (asked.prompt or asked.suffix)


def to_prompt(asked: ChatRequest | GenerateRequest) -> processor_pb2.Prompt:
    """Raises `BadRequest`."""
    if isinstance(asked, ChatRequest):
        conversation = conversation_to_pb(asked.messages or (), asked.tools)
    elif asked.raw or asked.suffix:
        return _without_template(asked)
    else:
        texts = (("system", asked.system), ("user", asked.prompt))
        messages = [Message(role=role, content=text) for role, text in texts if text]
        conversation = conversation_to_pb(messages, None)
    _put_thinking(asked, conversation)
    return processor_pb2.Prompt(conversation=conversation)


def to_sampling(asked: Answering) -> common_pb2.Sampling:
    """Raises `BadRequest`."""
    sampling = options_to_pb(asked.options)
    if asked.logprobs is not None:
        sampling.logprobs = asked.logprobs
    if asked.top_logprobs is not None:
        sampling.top_logprobs = asked.top_logprobs
    if isinstance(asked.format, dict):
        schema = msgspec.json.encode(asked.format).decode()
        sampling.structured_output.json_schema = schema
    elif asked.format:
        BadRequest.unless(asked.format == JSON, "format", asked.format, "json or a JSON Schema")
        sampling.structured_output.json_object = True
    return sampling


def names_of(asked: ChatRequest | GenerateRequest) -> dict[str, str]:
    """Client's names of fields, by the contract's names."""
    names = {
        **NAMES,
        "structured_output.json_schema": "format",
        "structured_output.json_object": "format",
        "reasoning_effort": "think",
        "chat_template_kwargs": "think",
    }
    if isinstance(asked, GenerateRequest):
        names["messages"] = "prompt"
    return names


def _without_template(asked: GenerateRequest) -> processor_pb2.Prompt:
    """A prompt as it is, or the texts around a gap. Raises `UnsupportedField` for fields that a
    template would read."""
    given = "suffix" if asked.suffix else "raw"
    for name, value in (("system", asked.system), ("think", asked.think)):
        if value:
            raise UnsupportedField(name, f"with `{given}` the prompt has no template")
    return processor_pb2.Prompt(text=asked.prompt or "", suffix=asked.suffix or None)


def _put_thinking(asked: Answering, conversation: processor_pb2.Conversation) -> None:
    """Sets whether and how much the model thinks. Without the field its template decides."""
    if asked.think is True:
        variables = {"enable_thinking": True, "thinking": True}
        conversation.chat_template_kwargs_json = msgspec.json.encode(variables).decode()
    elif asked.think is False:
        conversation.reasoning_effort = "none"
    elif asked.think is not None:
        conversation.reasoning_effort = asked.think
