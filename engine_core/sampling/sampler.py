"""From logits to tokens under each row's sampling contract, by a platform's operations. Knows nothing about scheduling
or the model.

Order: log probabilities from raw logits; then allowed ids, bad words, minimum length, bias, penalties; the mask of a
grammar; then greedy, or temperature, min-p, top-k, top-p and Gumbel noise that is a pure function of seed, choice,
output index and token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headwater.engine_core.executor import AdmittedRow, Int32Array
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling.operations import SamplingOperations
from headwater.engine_core.sampling_params import SamplingParams
from headwater.kernels.filtered_sample import Filters
from headwater.kernels.penalties import penalize_twin
from headwater.kernels.sample import Draws

Known = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""From the index of what is sampled to the ids of the prompt and of the outputs before it, both int32 [n]."""


class Sampler:
    """Keeps the contract of each row of the request table."""

    def __init__(self, num_rows: int, operations: SamplingOperations, device: torch.device) -> None:
        self._operations, self._device = operations, device
        self._params = [SamplingParams()] * num_rows
        self._seeds = np.zeros(num_rows, np.int64)
        self._choices = np.zeros(num_rows, np.int32)
        self._temperatures = np.zeros(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int32)
        self._top_ps = np.ones(num_rows, np.float32)
        self._min_ps = np.zeros(num_rows, np.float32)
        self._is_edited = np.zeros(num_rows, np.bool_)
        self._num_logprobs = np.full(num_rows, -1, np.int32)

    def admit(self, admitted: AdmittedRow) -> None:
        row, params = admitted.row, admitted.sampling
        self._params[row] = params
        self._seeds[row], self._choices[row] = params.seed, admitted.choice_index
        self._temperatures[row] = 0.0 if params.is_greedy else params.temperature
        self._top_ks[row], self._top_ps[row], self._min_ps[row] = max(params.top_k, 0), params.top_p, params.min_p
        self._is_edited[row] = edits_logits(params)
        self._num_logprobs[row] = -1 if params.num_logprobs is None else params.num_logprobs

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        known: Known,
        masks: Int32Array | None = None,
    ) -> tuple[Int32Array, dict[int, TokenLogprobs]]:
        """logits [S, V] after some token of table rows [S], under masks [S, words] if given; returns int32 [S] and log
        probabilities by index."""
        tokens = self.draw(logits, rows, output_indices, known, masks)
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not wanted.size:
            return tokens, {}
        chosen = self._on_device(tokens[wanted])
        entries = self._score(logits[self._on_device(wanted)], chosen, self._num_logprobs[rows[wanted]].tolist())
        return tokens, dict(zip(wanted.tolist(), entries, strict=True))

    def draw(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        known: Known,
        masks: Int32Array | None = None,
    ) -> Int32Array:
        """As `sample`, the tokens alone."""
        raw = logits
        if self._is_edited[rows].any():
            logits = logits.float()
            logits = logits.clone() if logits is raw else logits
            for i in np.flatnonzero(self._is_edited[rows]).tolist():
                edit(logits[i], self._params[rows[i]], int(output_indices[i]), *known(i))
        return self._draw(logits, rows, output_indices, None if masks is None else self._on_device(masks))

    def score_prompt(self, logits: torch.Tensor, token_ids: torch.Tensor, row: int) -> list[TokenLogprobs]:
        """Of prompt tokens int32 [N] under the logits [N, V] before each."""
        num_top = self._params[row].num_prompt_logprobs or 0
        return self._score(logits, token_ids, [num_top] * len(token_ids))

    def _draw(
        self, logits: torch.Tensor, rows: Int32Array, output_indices: Int32Array, masks: torch.Tensor | None
    ) -> Int32Array:
        is_filtered = (self._top_ks[rows] > 0) | (self._top_ps[rows] < 1) | (self._min_ps[rows] > 0)
        is_filtered &= self._temperatures[rows] > 0
        if not is_filtered.any():
            return self._on_host(self._operations.draw(logits, self._draws(rows, output_indices), masks))
        tokens = np.empty(len(rows), np.int32)
        plain, filtered = np.flatnonzero(~is_filtered), np.flatnonzero(is_filtered)
        if plain.size:
            at, draws = self._on_device(plain), self._draws(rows[plain], output_indices[plain])
            tokens[plain] = self._on_host(
                self._operations.draw(logits[at], draws, None if masks is None else masks[at])
            )
        at, draws = self._on_device(filtered), self._draws(rows[filtered], output_indices[filtered])
        some = logits[at].float() if masks is None else self._operations.mask_tokens(logits[at], masks[at])
        tokens[filtered] = self._on_host(self._operations.draw_filtered(some, draws, self._filters(rows[filtered])))
        return tokens

    def _score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_tops: list[int]) -> list[TokenLogprobs]:
        """Of token_ids int32 [R] and of the likeliest num_tops[i] ids of each row of logits [R, V]."""
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


def edits_logits(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids
        or params.bad_words
        or params.logit_bias
        or params.has_penalties
        or (params.min_tokens and params.min_tokens_blocked_ids)
    )


def edit(
    logits: torch.Tensor, params: SamplingParams, output_index: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor
) -> None:
    """One row, float32 [V], in place."""
    if params.allowed_token_ids:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        logits.masked_fill_(forbidden, float("-inf"))
    for word in params.bad_words:
        if len(word) == 1 or output_ids[max(0, len(output_ids) - len(word) + 1) :].tolist() == list(word[:-1]):
            logits[word[-1]] = float("-inf")
    if output_index < params.min_tokens:
        logits[list(params.min_tokens_blocked_ids)] = float("-inf")
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.has_penalties:
        _penalize(logits, params, prompt_ids, output_ids)


def _penalize(logits: torch.Tensor, params: SamplingParams, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
    counts = torch.bincount(output_ids.long(), minlength=len(logits))
    in_prompt = torch.zeros_like(counts, dtype=torch.bool)
    in_prompt[prompt_ids.long()] = True
    strengths = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    repetition, presence, frequency = (torch.tensor([strength], device=logits.device) for strength in strengths)
    penalized = penalize_twin(logits[None], counts[None], in_prompt[None], repetition, presence, frequency)
    logits.copy_(penalized[0])
