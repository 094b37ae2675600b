"""A step that is launched on a GPU, and what it sampled once it is done. Knows nothing about plans
and launches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...executor import Int32Array, StepResult
from ...request import TokenLogprobs
from ...sampling.verification import Gained, gained
from ..entry.device_rows import DeviceGains
from .device_sampler import Scores
from .score_table import SampledScores


@dataclass(slots=True)
class InFlightStep:
    """A step that is launched. To call it, once the step is done, returns its result."""

    tokens: torch.Tensor
    """[positions], pinned."""
    num_sampled: int
    """S, of which it samples: rows, or with drafts positions, those of a row one after
    another."""
    num_drafts: Int32Array | None = None
    """Drafts of each row that is sampled; None: no row has any."""
    drafts: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """[S] see `drafts_in_place`."""
    gains: DeviceGains | None = None
    """Gains of rows where the device drafts."""
    scores: SampledScores | None = None
    prompt_scores: dict[int, tuple[list[Scores], int]] = field(default_factory=dict)
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    """By row, of prompts that are pooled."""

    def __call__(self) -> StepResult:
        prompt_logprobs = {
            row: [_cut(entry, num_top) for scores in parts for entry in _entries(scores)]
            for row, (parts, num_top) in self.prompt_scores.items()
        }
        found, num_positions, num_drafts = self._gained()
        return StepResult(
            token_ids=found.token_ids,
            num_tokens=found.num_tokens,
            num_drafts=num_drafts,
            logprobs=self._logprobs(found, num_positions),
            prompt_logprobs=prompt_logprobs,
            embeddings={
                row: vector.cpu().numpy().tobytes() for row, vector in self.vectors.items()
            },
        )

    def _gained(self) -> tuple[Gained, Int32Array, Int32Array | None]:
        """Tokens that the step's rows gained, the number of positions of each, and the number of
        its drafts where the device drafted."""
        # A later step writes to the same memory.
        tokens: Int32Array = self.tokens.numpy()[: self.num_sampled].copy()
        if self.gains is not None:
            token_ids, num_tokens, num_drafts = self.gains.read(tokens)
            return Gained(token_ids, num_tokens), self.gains.num_positions, num_drafts
        if self.num_drafts is not None:
            num_positions = self.num_drafts + 1
            return gained(tokens, self.drafts, num_positions), num_positions, None
        ones = np.ones(len(tokens), np.int32)
        return Gained(tokens[:, None], ones), ones, None

    def _logprobs(self, found: Gained, num_positions: Int32Array) -> dict[int, TokenLogprobs]:
        """Log probabilities of tokens that count, as `StepResult` has them."""
        if self.scores is None:
            return {}
        rows, columns = found.places
        positions = (np.cumsum(num_positions) - num_positions)[rows] + columns
        is_wanted = self.scores.num_tops[positions] >= 0
        entries = (rows * found.token_ids.shape[1] + columns)[is_wanted]
        return dict(zip(entries.tolist(), self.scores.entries(positions[is_wanted]), strict=True))


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
