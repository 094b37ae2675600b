"""A step that is launched on a GPU, and what it sampled once it is done. Knows nothing about plans and launches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headwater.engine_core.executor import Int32Array, StepResult
from headwater.engine_core.executors.device_sampler import Scores
from headwater.engine_core.executors.own_rows import OwnGains
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling.verification import Gained, by_entry, gained


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step that is launched."""

    step: int
    tokens: torch.Tensor
    """[steps, rows], pinned; there when `done`."""
    steps: Int32Array
    """[S, n] in which step of `tokens` each sampled row's are."""
    row_steps: Int32Array | None
    """[S] of them that count; None: one each."""
    num_drafts: Int32Array | None = None
    """Drafts of each row that is sampled; None: no row has any. With drafts S counts positions, those of a row one
    after another."""
    drafts: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """[S] see `drafts_in_place`."""
    own: OwnGains | None = None
    """Of a step in which the device drafts; S counts positions then, too."""
    done: torch.cuda.Event
    scored: dict[int, int] = field(default_factory=dict)
    """From the index of a sampled row to its row of `scores`."""
    scores: Scores | None = None
    num_tops: dict[int, int] = field(default_factory=dict)
    prompt_scores: dict[int, tuple[list[Scores], int]] = field(default_factory=dict)
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    """By row, of prompts that are pooled."""

    def result(self) -> StepResult:
        """Waits for the step, and returns what it sampled."""
        self.done.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        if self.scores is not None:
            entries = _entries(self.scores)
            logprobs = {j: _cut(entries[i], self.num_tops[j]) for j, i in self.scored.items()}
        prompt_logprobs = {
            row: [_cut(entry, num_top) for scores in parts for entry in _entries(scores)]
            for row, (parts, num_top) in self.prompt_scores.items()
        }
        found, logprobs, num_drafts = self._gained(logprobs)
        return StepResult(
            token_ids=found.token_ids,
            num_tokens=found.num_tokens,
            num_drafts=num_drafts,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embeddings={row: vector.cpu().numpy().tobytes() for row, vector in self.vectors.items()},
        )

    def _gained(self, logprobs: dict[int, TokenLogprobs]) -> tuple[Gained, dict[int, TokenLogprobs], Int32Array | None]:
        """What the step's rows gained, of log probabilities by position those of tokens that count, and how many drafts
        each row had, where the device drafted."""
        if self.own is not None:
            token_ids, num_tokens, num_drafts = self.own.read(self.tokens.numpy()[0, : len(self.steps)])
            found = Gained(token_ids, num_tokens)
            return found, by_entry(found, self.own.num_positions, logprobs), num_drafts
        tokens: Int32Array = self.tokens.numpy()[self.steps, np.arange(len(self.steps))[:, None]]
        if self.num_drafts is None:
            num_tokens = np.ones(len(tokens), np.int32) if self.row_steps is None else self.row_steps
            return Gained(tokens, num_tokens), logprobs, None
        num_positions = self.num_drafts + 1
        found = gained(tokens[:, 0], self.drafts, num_positions)
        return found, by_entry(found, num_positions, logprobs), None


def _entries(scores: Scores) -> list[TokenLogprobs]:
    columns = (scores.chosen.tolist(), scores.top_ids.tolist(), scores.top_logprobs.tolist())
    return [
        TokenLogprobs(logprob=chosen, top_ids=ids, top_logprobs=values)
        for chosen, ids, values in zip(*columns, strict=True)
    ]


def _cut(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return replace(entry, top_ids=entry.top_ids[:num_top], top_logprobs=entry.top_logprobs[:num_top])
