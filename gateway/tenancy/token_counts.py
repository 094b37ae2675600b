"""Token counts of a request for tenancy. Knows nothing about prompts, choices or engines."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class TokenNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and seats that a request needs before it runs."""

    num_prompts: int
    num_answers: int
    """Number of choices that are answered with tokens."""
    prompt_tokens: int
    first_tokens: int
    """Number of tokens of answers that are reserved at first. More is requested while the answers
    grow."""
    num_seats: int
    """Number of seats that all choices take together."""
    num_first_seats: int
    """Number of seats without which no choice can begin."""


class TokenUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a request has used, over all its prompts."""

    num_prompts: int
    num_sent: int
    """Number of prompts that were sent to a replica. The counts below are theirs."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRequest:
    """A request that began at another gateway, or over an earlier connection, and continues
    here."""

    request_id: str
    prompt_tokens: int
    """Number of tokens of the prompt."""
    charged_prompt_tokens: int
    """Number of prompt tokens that earlier gateways have charged."""
    charged_output_tokens: int
    num_tokens: int
    """Number of output tokens so far, over all choices."""
    granted: int
    """Output tokens up to which the choices may go without more credit."""
    num_outstanding: int
    """Number of output tokens that may still come without more credit."""
    num_seats: int
    num_readers: int
    is_charged: bool
    """Whether every token is charged."""
