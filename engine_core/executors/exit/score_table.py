"""Log probabilities of a step's sampled tokens: on the device, then in pinned memory, then as
results carry them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headwater.kernels.sampling.logprobs import logprobs
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice

from ...executor import Int32Array
from ...request import TokenLogprobs
from ...sampling.verification import Gained
from ...sampling_params import MOST_LOGPROBS

_IDS = 1
_LOGPROBS = 1 + MOST_LOGPROBS
_NUM_WORDS = 1 + 2 * MOST_LOGPROBS
"""Words of a position: the token's own value, ids of the likeliest tokens, and their values."""


@dataclass(frozen=True, slots=True)
class SampledScores:
    """Log probabilities at the positions of one step."""

    words: Int32Array
    """[S, words], there when the step is done."""
    num_tops: Int32Array
    """[S] alternatives that each wants; negative: no log probabilities at all."""

    def by_entry(self, found: Gained, num_positions: Int32Array) -> dict[int, TokenLogprobs]:
        """Log probabilities of tokens that count, as `StepResult` has them; num_positions [S] of
        each row."""
        rows, columns = found.places
        positions = (np.cumsum(num_positions) - num_positions)[rows] + columns
        is_wanted = self.num_tops[positions] >= 0
        entries = (rows * found.token_ids.shape[1] + columns)[is_wanted]
        return dict(zip(entries.tolist(), self.entries(positions[is_wanted]), strict=True))

    def entries(self, positions: npt.NDArray[np.int64]) -> list[TokenLogprobs]:
        """Entries of positions for which scores were requested."""
        words = self.words[positions]
        num_tops = self.num_tops[positions]
        most = int(num_tops.max(initial=0))
        columns = (
            words[:, 0].view(np.float32).tolist(),
            words[:, _IDS : _IDS + most].tolist(),
            words[:, _LOGPROBS : _LOGPROBS + most].view(np.float32).tolist(),
        )
        return [
            TokenLogprobs(logprob=chosen, top_ids=ids[:num_top], top_logprobs=values[:num_top])
            for chosen, ids, values, num_top in zip(*columns, num_tops.tolist(), strict=True)
        ]


class NoScores:
    """See `SampledScores`: no position wants any."""

    def by_entry(self, found: Gained, num_positions: Int32Array) -> dict[int, TokenLogprobs]:
        return {}


NO_SCORES = NoScores()


class ScoreTable:
    """One table on the device, which a step's launches fill, and a copy of it for each step in
    flight."""

    def __init__(self, num_copies: int, num_positions: int, device: torch.device) -> None:
        self._words = torch.zeros(num_positions, _NUM_WORDS, dtype=torch.int32, device=device)
        shape = num_copies, *self._words.shape
        self._copies = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")

    def fill(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        num_tops: torch.Tensor,
        part: VocabularySlice | None = None,
    ) -> None:
        """Scores positions [S], all in one launch; see `logprobs`."""
        ids = self._words[: len(token_ids)]
        values = self._words[: len(token_ids)].view(torch.float32)
        logprobs(
            logits,
            token_ids,
            num_tops,
            values[:, 0],
            ids[:, _IDS:_LOGPROBS],
            values[:, _LOGPROBS:],
            part,
        )

    def copy(self, step: int, num_tops: Int32Array) -> SampledScores:
        """Starts to copy the scores of positions [S], num_tops[i] alternatives each. The copy is
        overwritten after as many steps as there are copies."""
        copied = self._copies[step % len(self._copies), : len(num_tops)]
        copied.copy_(self._words[: len(num_tops)], non_blocking=True)
        return SampledScores(copied.numpy(), num_tops)
