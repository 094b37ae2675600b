"""A request to the Messages API in the contract's form. Fields that a client left out stay
absent."""

from __future__ import annotations

import msgspec

from headwater.proto import common_pb2, processor_pb2

from ..wire.required import given
from .conversation import Turns
from .schema import CountTokensRequest, MessagesRequest, Thinking
from .tools import MessageTools

_SAME = ("temperature", "top_p", "top_k", "max_tokens")
"""Fields that the contract has under the same names."""


def to_prompt(asked: CountTokensRequest) -> processor_pb2.Prompt:
    """Raises `BadRequest`."""
    prompt = processor_pb2.Prompt()
    conversation = prompt.conversation
    turns = Turns(conversation)
    turns.add_all(asked)
    if turns.ends_in_answer:
        conversation.continue_final_message = True
    conversation.MergeFrom(MessageTools(asked.tools).to_pb(asked.tool_choice))
    _put_effort(asked, conversation)
    return prompt


def to_sampling(asked: MessagesRequest) -> common_pb2.Sampling:
    values = {name: getattr(asked, name) for name in _SAME}
    sampling = common_pb2.Sampling(**values, stop=asked.stop_sequences or ())
    if asked.thinking is not None and asked.thinking.type == "enabled":
        sampling.thinking_token_budget = _budget(asked.thinking)
    if asked.output_config is not None and (form := asked.output_config.format) is not None:
        sampling.structured_output.json_schema = msgspec.json.encode(form.schema).decode()
    return sampling


def names_of(asked: CountTokensRequest) -> dict[str, str]:
    """Client's names of fields, by the contract's names. Read for errors alone."""
    turns = Turns(processor_pb2.Conversation())
    turns.add_all(asked)
    return {
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "structured_output.json_schema": "output_config.format.schema",
        "reasoning_effort": "output_config.effort",
        "chat_template_kwargs": "thinking",
        **turns.renamed,
        **MessageTools(asked.tools).renamed(),
    }


def _put_effort(asked: CountTokensRequest, conversation: processor_pb2.Conversation) -> None:
    """Sets whether and how much the model thinks. Without these fields its template decides."""
    effort = asked.output_config.effort if asked.output_config is not None else None
    if effort is not None:
        conversation.reasoning_effort = effort
    if asked.thinking is None:
        return
    # Agents ask every model for thoughts.
    conversation.thoughts_are_optional = asked.thinking.type == "enabled"
    if asked.thinking.type == "disabled":
        conversation.reasoning_effort = "none"
    elif effort is None:
        variables = {"enable_thinking": True, "thinking": True}
        conversation.chat_template_kwargs_json = msgspec.json.encode(variables).decode()
    if asked.thinking.display == "omitted":
        conversation.include_reasoning = False


def _budget(thinking: Thinking) -> int:
    return given("thinking.budget_tokens", thinking.budget_tokens, "a whole number, at least 1")
