"""How a request's tokens are chosen, checked and complete. Knows nothing about text or tensors;
imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""
MOST_LOGPROBS = 20
"""Alternatives beside a token whose log probabilities come with it, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling contract of one choice, after validation: every field has its final value.

    Ids lie inside the vocabulary and ranges hold; whoever builds one from a client's words (the
    processor) has refused everything else, so the engine asserts instead of checking.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer, end-of-sequence ids included unless they are ignored."""
    min_tokens_blocked_ids: tuple[int, ...] = ()
    """Ids that are not sampled before `min_tokens` outputs."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never appear."""
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids of which one is sampled; empty: all."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None
    """Number of alternatives beside the chosen token whose log probabilities are returned; None: no
    log probabilities."""
    num_prompt_logprobs: int | None = None
    pooling: str = ""
    """How a prompt's hidden states become one vector: last, mean or cls (the first), or one of each
    token: token (vectors) or sparse (weights); nothing is sampled then. Empty: tokens are
    sampled."""
    attended_len: int = 0
    """Number of first tokens of a text that its tokens attend to; 0: all."""
    second_start: int = 0
    """First position of tokens of the second type, of a prompt that is a pair of texts; 0: all are
    of the first."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )
