"""Draws tokens under top-k, top-p and min-p on a CPU: among the likeliest candidates, which nearly always hold all
that the filters keep; a row where they do not is drawn from its whole sorted vocabulary. Same tokens as
`filtered_sample_twin`."""

from __future__ import annotations

import torch

from .filtered_sample import Filters, filtered_sample_twin
from .gumbel import gumbel_noise, noise_keys
from .sample import Draws

NUM_CANDIDATES = 512


def candidate_sample(logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    """Draws from logits float32 [R, V], with every temperature above 0; returns int32 [R]."""
    vocab_size = logits.shape[1]
    top = logits.topk(min(vocab_size, max(NUM_CANDIDATES, int(filters.top_ks.max()) + 1)), dim=1)
    scaled = top.values.double() / draws.temperatures[:, None].double()
    kept = _kept(scaled, logits, draws, filters)
    scores = (top.values / draws.temperatures[:, None]) + gumbel_noise(_keys(draws), top.indices.int())
    best = scores.masked_fill_(~kept, float("-inf")).argmax(1, keepdim=True)
    tokens = top.indices.gather(1, best)[:, 0].int()
    overflowing = kept[:, -1] if top.values.shape[1] < vocab_size else torch.zeros_like(kept[:, -1])
    if overflowing.any():
        tokens[overflowing] = filtered_sample_twin(
            logits[overflowing], draws.select(overflowing), _select_filters(filters, overflowing)
        )
    return tokens


def _kept(scaled: torch.Tensor, logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    """Candidates that the filters keep, bool [R, N]; candidates are in descending order."""
    num_candidates = scaled.shape[1]
    least = scaled[:, :1] + filters.min_ps.double().log()[:, None]
    kept = scaled >= least
    k = torch.where(filters.top_ks > 0, filters.top_ks, num_candidates).clamp(max=num_candidates).long()
    kept &= scaled >= scaled.gather(1, k[:, None] - 1)
    weights = (scaled - scaled[:, :1]).exp()
    # The mass that top-p counts is that of top-k's tokens, or, without top-k, of the whole row above min-p's bound.
    everything = logits.double() / draws.temperatures[:, None].double()
    row_mass = (everything - scaled[:, :1]).exp().masked_fill_(everything < least, 0.0).sum(1)
    mass = torch.where(filters.top_ks > 0, (weights * kept).sum(1), row_mass)
    mass_above = (weights.cumsum(1) - weights) / mass[:, None]
    inside = mass_above < filters.top_ps[:, None].double()
    lowest = scaled.masked_fill(~inside, float("inf")).amin(1, keepdim=True)
    return kept & ((scaled >= lowest) | (filters.top_ps >= 1)[:, None])


def _keys(draws: Draws) -> torch.Tensor:
    return noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)


def _select_filters(filters: Filters, rows: torch.Tensor) -> Filters:
    return Filters(top_ks=filters.top_ks[rows], top_ps=filters.top_ps[rows], min_ps=filters.min_ps[rows])
