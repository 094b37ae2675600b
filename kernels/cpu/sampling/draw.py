"""Draws tokens from whole rows of logits on a CPU: the same that `sample.scores_twin` has highest,
or, where the temperature is 0, the first of the likeliest.

A fast pass finds every row's few tokens that could have the highest score (`draw_candidates`); only
their scores are computed exactly.
"""

from __future__ import annotations

import numpy as np
import torch

from ...sampling.gumbel import gumbel_noise, noise_keys
from ...sampling.sample import Draws, scores_twin
from ...sampling.token_mask import LOWEST, mask_tokens_twin
from ..compiler.simd_types import NUM_LANES
from .draw_candidates import KERNEL, NUM_CANDIDATES


def draw(
    logits: torch.Tensor, draws: Draws, masks: torch.Tensor | None = None, *, first_token: int = 0
) -> torch.Tensor:
    """Draws from logits [R, V], float32 or bfloat16, under masks int32 [R, words] as `mask_tokens`
    has them; returns int32 [R]. The noise is that of the tokens from `first_token` on, which is
    token 0 of what is returned."""
    logits, (num_rows, vocab_size) = logits.contiguous(), logits.shape
    if vocab_size < NUM_LANES:
        wide = logits if masks is None else mask_tokens_twin(logits, masks)
        return scores_twin(wide, draws, first_token).argmax(1).int()
    if masks is not None and vocab_size % NUM_LANES:
        return draw(mask_tokens_twin(logits, masks), draws, first_token=first_token)
    keys = torch.empty(num_rows, 2, dtype=torch.int32)
    candidates = torch.zeros(num_rows, NUM_CANDIDATES, dtype=torch.int32)
    counts = torch.empty(num_rows, dtype=torch.int32)
    seeds = draws.seeds.contiguous()
    choices = draws.choice_indices.int().contiguous()
    temperatures = draws.temperatures.contiguous()
    outputs = draws.output_indices.int().contiguous()
    addresses = [tensor.data_ptr() for tensor in (logits, keys, temperatures, candidates, counts)]
    mask = (0, 0) if masks is None else (masks.data_ptr(), masks.stride(0) * 4)
    of_keys = [tensor.data_ptr() for tensor in (seeds, choices, outputs)]
    KERNEL(
        logits.dtype,
        num_rows,
        8 * logits.numel(),
        *addresses,
        vocab_size,
        *mask,
        first_token,
        *of_keys,
    )
    tokens = candidates[:, 0].clone()
    # Nearly every draw has a single candidate, whose exact score decides nothing.
    undecided = np.flatnonzero((temperatures.numpy() > 0) & (counts.numpy() != 1))
    if undecided.size:
        at = torch.from_numpy(undecided)
        some = logits[at] if masks is None else mask_tokens_twin(logits[at], masks[at])
        tokens[at] = _best_of(
            some, candidates[at], counts[at], keys[at], draws.select(at), first_token
        )
    return tokens


def _best_of(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    counts: torch.Tensor,
    keys: torch.Tensor,
    draws: Draws,
    first_token: int,
) -> torch.Tensor:
    """Tokens int32 [R] with the highest exact score of the candidates [R, NUM_CANDIDATES], or of
    all tokens where more were counted. logits [R, V] are masked; all rows are random."""
    scaled = logits.gather(1, candidates.long()).float() / draws.temperatures[:, None]
    best = (scaled + gumbel_noise(keys, candidates + first_token)).argmax(1, keepdim=True)
    tokens = candidates.gather(1, best)[:, 0]
    crowded = torch.nonzero(counts > NUM_CANDIDATES)[:, 0]
    if len(crowded):
        tokens[crowded] = (
            scores_twin(logits[crowded], draws.select(crowded), first_token).argmax(1).int()
        )
    return tokens


def scores_of(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    draws: Draws,
    masks: torch.Tensor | None = None,
    *,
    first_token: int = 0,
) -> torch.Tensor:
    """Scores float32 [R] of tokens int32 [R], as `draw` compares them; minus infinity where a mask
    excludes them."""
    scores = logits.gather(1, tokens[:, None].long())[:, 0].float()
    if masks is not None:
        words = masks.gather(1, tokens[:, None].long() // 32)[:, 0]
        is_allowed = (words >> (tokens % 32)) & 1 != 0
        scores = scores.clamp_(min=LOWEST).masked_fill_(~is_allowed, -np.inf)
    keys = noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)
    noise = gumbel_noise(keys, tokens[:, None] + first_token)[:, 0]
    is_random = draws.temperatures > 0
    return torch.where(
        is_random, scores / torch.where(is_random, draws.temperatures, 1.0) + noise, scores
    )
