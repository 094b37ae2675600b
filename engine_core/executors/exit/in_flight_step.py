"""A launched step on a GPU, and its sampled tokens once it is complete. Knows nothing about plans
and launches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from ...executor import Int32Array, StepResult
from ...request import TokenLogprobs
from ...sampling.verification import Gained, gained
from .device_sampler import Scores
from .score_table import NO_SCORES, NoScores, SampledScores


class Gains(Protocol):
    """How sampled tokens become tokens that rows gain."""

    @property
    def num_positions(self) -> Int32Array:
        """[S] positions of each row that samples."""

    def read(self, sampled: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array | None]:
        """Sorts the tokens of all positions [P] by row. Returns them [S, n], how many of them each
        row gained, and how many drafts it had, where the device drafted."""


@dataclass(frozen=True, slots=True)
class KnownGains:
    """See `Gains`, of rows whose drafts, if they have any, the host knows."""

    num_positions: Int32Array
    drafts: Int32Array
    """[P] see `drafts_in_place`; not read where each row has one position."""

    @classmethod
    def without_drafts(cls, num_rows: int) -> KnownGains:
        return cls(np.ones(num_rows, np.int32), np.empty(0, np.int32))

    def read(self, sampled: Int32Array) -> tuple[Int32Array, Int32Array, None]:
        return *gained(sampled, self.drafts, self.num_positions), None


@dataclass(slots=True)
class InFlightStep:
    """A step that is launched. To call it, once the step is done, returns its result."""

    tokens: torch.Tensor
    """[positions], pinned."""
    num_sampled: int
    """Number of sampled positions, row after row."""
    gains: Gains
    scores: SampledScores | NoScores = NO_SCORES
    prompt_scores: dict[int, tuple[list[Scores], int]] = field(default_factory=dict)
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    """Keyed by row, of prompts that are pooled."""

    def __call__(self) -> StepResult:
        prompt_logprobs = {
            row: [_cut(entry, num_top) for scores in parts for entry in _entries(scores)]
            for row, (parts, num_top) in self.prompt_scores.items()
        }
        # A later step writes to the same memory.
        tokens: Int32Array = self.tokens.numpy()[: self.num_sampled].copy()
        token_ids, num_tokens, num_drafts = self.gains.read(tokens)
        return StepResult(
            token_ids=token_ids,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            logprobs=self.scores.by_entry(Gained(token_ids, num_tokens), self.gains.num_positions),
            prompt_logprobs=prompt_logprobs,
            embeddings={
                row: vector.cpu().numpy().tobytes() for row, vector in self.vectors.items()
            },
        )


def _entries(scores: Scores) -> list[TokenLogprobs]:
    columns = (scores.chosen.tolist(), scores.top_ids.tolist(), scores.top_logprobs.tolist())
    return [
        TokenLogprobs(logprob=chosen, top_ids=ids, top_logprobs=values)
        for chosen, ids, values in zip(*columns, strict=True)
    ]


def _cut(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return replace(
        entry, top_ids=entry.top_ids[:num_top], top_logprobs=entry.top_logprobs[:num_top]
    )
