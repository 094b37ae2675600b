"""A request's tokens as tenancy counts them. Knows nothing about prompts, choices or engines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNeed:
    """The tokens and seats that a request needs before it runs."""

    num_prompts: int
    num_answers: int
    """Choices that are answered with tokens."""
    prompt_tokens: int
    first_tokens: int
    """Tokens of answers that are reserved at first. More is asked for while the answers grow."""
    num_seats: int
    """Seats that all choices take together."""
    num_first_seats: int
    """Seats without which no choice can begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUse:
    """The tokens that a request has used, over all its prompts."""

    num_prompts: int
    num_sent: int
    """Prompts that were sent to a replica. The counts below are theirs."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRequest:
    """A request that goes on here and began at another gateway, or over an earlier connection."""

    request_id: str
    prompt_tokens: int
    """Tokens of the prompt."""
    charged_prompt_tokens: int
    """Prompt tokens that earlier gateways have charged."""
    charged_output_tokens: int
    num_tokens: int
    """Output tokens so far, of all choices."""
    granted: int
    """Output tokens up to which the choices may go without more credit."""
    num_outstanding: int
    """Output tokens that may still come without more credit."""
    num_seats: int
    num_readers: int
    is_charged: bool
    """Every token is charged."""
