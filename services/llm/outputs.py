"""Results of requests in Python. Names and shapes are those of vLLM's `LLM` where it has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log probability of one token, natural logarithm."""

    logprob: float
    decoded_token: str
    """Text of the token; U+FFFD for bytes that are no whole characters."""


TokenLogprobs = dict[int, Logprob]
"""Log probabilities of a token and of its likeliest alternatives, by token id, the token's own
first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer, or its beginning."""

    index: int
    text: str
    """Content: the answer without thoughts and calls."""
    token_ids: list[int]
    """All tokens of the answer, with thoughts, calls and the token that ends it."""
    reasoning: str = ""
    """Thoughts before the answer."""
    tool_calls: list[ToolCall]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token; None if the request did not ask for log probabilities."""
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls`; None while the answer goes on."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Answers to one prompt."""

    request_id: str
    prompt: str | None
    """The prompt as it was given; None for token ids and conversations."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a prompt token, None for the first; None if the request did not ask for them."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Number of the prompt's tokens that were in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """Vector of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
