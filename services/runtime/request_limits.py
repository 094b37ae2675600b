"""Limits on the size of a request, the same for every surface. They are checked before any other
work on the request."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.proto import common_pb2, processor_pb2

from .errors import BadRequest

MAX_MESSAGE_PARTS = 16_384
"""Largest number of messages, parts of their content and calls in them, together."""
MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
"""Largest number of bytes of names, descriptions, schemas and grammars of all tools."""
MAX_GRAMMAR_BYTES = 1 << 20
"""Largest number of bytes of the grammar that is made of a request."""
MAX_BIASES = 1024
MAX_TEXTS = 1024
"""Largest length of a list of strings or token ids in the sampling fields."""
WHAT_FITS = 2**32 - 1
"""Value of `truncate_prompt_tokens` that keeps as many tokens as the context has room for."""


def check_count(param: str, count: int, most: int) -> None:
    """Raises `BadRequest` for a count above the limit."""
    if count > most:
        raise BadRequest(param, f"{param} has {count} entries; allowed: at most {most}")


def bounded_tools(tools: Iterable[common_pb2.Tool]) -> list[common_pb2.Tool]:
    """The tools. Raises `BadRequest` at the first one beyond a limit."""
    taken: list[common_pb2.Tool] = []
    num_bytes = 0
    for tool in tools:
        taken.append(tool)
        num_bytes += tool.ByteSize()
        check_count("tools", len(taken), MAX_TOOLS)
        if num_bytes > MAX_TOOLS_BYTES:
            raise BadRequest(
                "tools",
                f"tools have more than {MAX_TOOLS_BYTES} bytes; allowed: at most {MAX_TOOLS_BYTES}",
            )
    return taken


def check_conversation(conversation: processor_pb2.Conversation) -> None:
    """Raises `BadRequest` for a conversation beyond a limit."""
    check_count("messages", len(conversation.messages), MAX_MESSAGE_PARTS)
    num_parts = sum(
        1 + len(message.parts) + len(message.tool_calls) for message in conversation.messages
    )
    check_count("messages", num_parts, MAX_MESSAGE_PARTS)
    check_count("tools", len(conversation.tools), MAX_TOOLS)
    bounded_tools(conversation.tools)


def check_sampling_sizes(sampling: common_pb2.Sampling, vocab_size: int) -> None:
    """Raises `BadRequest` for a list in the sampling fields beyond a limit."""
    check_count("logit_bias", len(sampling.logit_bias), MAX_BIASES)
    for name in ("stop_token_ids", "bad_words"):
        check_count(name, len(getattr(sampling, name)), MAX_TEXTS)
    check_count("allowed_token_ids", len(sampling.allowed_token_ids), vocab_size)
