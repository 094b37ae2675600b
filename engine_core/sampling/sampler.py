"""Samples tokens from logits under each row's sampling contract, by a platform's operations. Knows
nothing about scheduling or the model.

Order: log probabilities from raw logits; then allowed ids, bad words, minimum length, bias,
penalties; the mask of a grammar; then greedy, or temperature, min-p, top-k, top-p and Gumbel noise
that is a pure function of seed, choice, output index and token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.sample import Draws

from ..executor import AdmittedRow, Int32Array
from ..ragged import run_lengths
from ..request import TokenLogprobs
from .edits import RequestEdits, edits_of
from .operations import SamplingOperations

Known = Callable[[int], Int32Array]
"""Function from the index of a sampled token to the ids of the outputs before it [n], of which
drafts are the last."""


Whole = Callable[[torch.Tensor], torch.Tensor]
"""Function that makes logits of all tokens [R, V] of those of some [R, N]."""


class Sampler:
    """Sampler with the contract of each row of the request table."""

    def __init__(
        self,
        num_rows: int,
        operations: SamplingOperations,
        device: torch.device,
        whole: Whole | None = None,
    ) -> None:
        """`whole`: joins logits over ranks; given where logits are those of a part of the
        vocabulary."""
        self._operations = operations
        self._device = device
        self._whole = whole
        self._edits: list[RequestEdits | None] = [None] * num_rows
        self._num_prompt_logprobs = np.zeros(num_rows, np.int32)
        self._seeds = np.zeros(num_rows, np.int64)
        self._choices = np.zeros(num_rows, np.int32)
        self._temperatures = np.zeros(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int32)
        self._top_ps = np.ones(num_rows, np.float32)
        self._min_ps = np.zeros(num_rows, np.float32)
        self._is_edited = np.zeros(num_rows, np.bool_)
        self._num_logprobs = np.full(num_rows, -1, np.int32)

    def admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        params = admitted.sampling
        edits = edits_of(admitted)
        self._edits[row] = None if edits is None else RequestEdits(edits)
        self._seeds[row] = params.seed
        self._choices[row] = admitted.choice_index
        self._temperatures[row] = 0.0 if params.is_greedy else params.temperature
        self._top_ks[row] = max(params.top_k, 0)
        self._top_ps[row] = params.top_p
        self._min_ps[row] = params.min_p
        self._is_edited[row] = edits is not None
        self._num_prompt_logprobs[row] = params.num_prompt_logprobs or 0
        self._num_logprobs[row] = -1 if params.num_logprobs is None else params.num_logprobs

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        known: Known,
        masks: Int32Array | None = None,
    ) -> tuple[Int32Array, dict[int, TokenLogprobs]]:
        """Samples from logits [S, V] after some token of table rows [S], under masks [S, words] if
        given; returns int32 [S] and log probabilities by index. Positions of one row stand side by
        side, each behind one more token."""
        tokens = self.draw(logits, rows, output_indices, known, masks)
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not wanted.size:
            return tokens, {}
        chosen = self._on_device(tokens[wanted])
        entries = self._score(
            logits[self._on_device(wanted)], chosen, self._num_logprobs[rows[wanted]].tolist()
        )
        return tokens, dict(zip(wanted.tolist(), entries, strict=True))

    def draw(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        known: Known,
        masks: Int32Array | None = None,
    ) -> Int32Array:
        """Like `sample`, for the tokens alone."""
        if self._is_edited[rows].any():
            logits = logits if self._whole is None else self._whole(logits)
            edited = torch.empty_like(
                logits, dtype=torch.float32, memory_format=torch.contiguous_format
            )
            logits = edited.copy_(logits)
            self._edit(logits, rows, output_indices, known)
        return self._draw(
            logits, rows, output_indices, None if masks is None else self._on_device(masks)
        )

    def score_prompt(
        self, logits: torch.Tensor, token_ids: torch.Tensor, row: int
    ) -> list[TokenLogprobs]:
        """Log probabilities of prompt tokens int32 [N] under the logits [N, V] before each."""
        num_top = int(self._num_prompt_logprobs[row])
        return self._score(logits, token_ids, [num_top] * len(token_ids))

    def _edit(
        self, logits: torch.Tensor, rows: Int32Array, output_indices: Int32Array, known: Known
    ) -> None:
        ends = np.cumsum(run_lengths(rows))
        for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            edits = self._edits[rows[first]]
            if edits is not None:
                edits.apply(logits[first:end], int(output_indices[first]), known(end - 1))

    def _draw(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        masks: torch.Tensor | None,
    ) -> Int32Array:
        is_filtered = (self._top_ks[rows] > 0) | (self._top_ps[rows] < 1) | (self._min_ps[rows] > 0)
        is_filtered &= self._temperatures[rows] > 0
        if not is_filtered.any():
            return self._on_host(
                self._operations.draw(logits, self._draws(rows, output_indices), masks)
            )
        tokens = np.empty(len(rows), np.int32)
        plain = np.flatnonzero(~is_filtered)
        filtered = np.flatnonzero(is_filtered)
        if plain.size:
            at = self._on_device(plain)
            draws = self._draws(rows[plain], output_indices[plain])
            tokens[plain] = self._on_host(
                self._operations.draw(logits[at], draws, None if masks is None else masks[at])
            )
        at = self._on_device(filtered)
        draws = self._draws(rows[filtered], output_indices[filtered])
        some = (
            logits[at].float()
            if masks is None
            else self._operations.mask_tokens(logits[at], masks[at])
        )
        tokens[filtered] = self._on_host(
            self._operations.draw_filtered(some, draws, self._filters(rows[filtered]))
        )
        return tokens

    def _score(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_tops: list[int]
    ) -> list[TokenLogprobs]:
        """Log probabilities of token_ids int32 [R] and of the likeliest num_tops[i] ids of each row
        of logits [R, V]."""
        chosen, top_ids, top_logprobs = self._operations.logprobs(logits, token_ids, max(num_tops))
        columns = (chosen.tolist(), top_ids.tolist(), top_logprobs.tolist())
        return [
            TokenLogprobs(logprob=logprob, top_ids=ids[:num_top], top_logprobs=values[:num_top])
            for logprob, ids, values, num_top in zip(*columns, num_tops, strict=True)
        ]

    def _filters(self, rows: Int32Array) -> Filters:
        return Filters(
            top_ks=self._on_device(self._top_ks[rows]),
            top_ps=self._on_device(self._top_ps[rows]),
            min_ps=self._on_device(self._min_ps[rows]),
        )

    def _draws(self, rows: Int32Array, output_indices: Int32Array) -> Draws:
        return Draws(
            temperatures=self._on_device(self._temperatures[rows]),
            seeds=self._on_device(self._seeds[rows]),
            choice_indices=self._on_device(self._choices[rows]),
            output_indices=self._on_device(output_indices),
        )

    def _on_device(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _on_host(self, tokens: torch.Tensor) -> Int32Array:
        array: Int32Array = tokens.cpu().numpy()
        return array
