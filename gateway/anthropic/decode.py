"""Bodies of the Messages API, decoded. Unknown fields are named in the log; those that would change
the answer are refused by name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headwater.services.runtime.errors import UnsupportedField

from ..wire import decode as wire

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
NOT_SERVED = {
    # Anthropic's.
    "container": "this version runs no code",
    "mcp_servers": "this version calls no servers of tools; the client runs all tools",
    "output_format": "here it is `output_config.format`",
    # Names that other endpoints have for what Messages has, or does not have.
    "max_completion_tokens": "here it is `max_tokens`",
    "stop": "here it is `stop_sequences`",
    "parallel_tool_calls": "here it is `tool_choice.disable_parallel_tool_use`",
    "reasoning_effort": "here it is `output_config.effort`",
    "response_format": "here it is `output_config.format`",
    **dict.fromkeys(
        (
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "min_p",
            "min_tokens",
            "n",
            "presence_penalty",
            "repetition_penalty",
            "seed",
            "stop_token_ids",
            "structured_outputs",
            "top_logprobs",
        ),
        "it is a field of /v1/chat/completions",
    ),
}
"""Unknown fields that would change the answer if they were served, each with the reason."""


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decodes a body. Raises `BadRequest`. Unknown fields are accepted at any depth, and named in
    the log once."""
    return wire.decode(body, kind, _is_without_effect)


def _is_without_effect(field: wire.UnknownField) -> bool:
    """Whether the field has an empty value and so changes nothing. Raises `UnsupportedField` for
    another value."""
    if field.name not in NOT_SERVED:
        return False
    if field.value:
        raise UnsupportedField(field.path, NOT_SERVED[field.name])
    return True
