"""Draws tokens under top-k, top-p and min-p on a CPU: among the likeliest candidates, which nearly
always hold all that the filters keep; a row where they do not is drawn in rounds over its logits
(`candidate_rounds`). Same tokens as `filtered_sample_twin`.

Ranks that have the logits of some tokens each exchange their candidates, and what their tokens
weigh. They draw the token that one process draws: values are compared as they are, and masses are
sums that no order changes.
"""

from __future__ import annotations

import torch

from ...sampling.filtered_sample import Filters
from ...sampling.gumbel import gumbel_noise, noise_keys
from ...sampling.sample import Draws
from ...sampling.vocabulary_slice import JoinedSlice
from ..row_weights import row_weights
from .candidate_rounds import draw_in_rounds, least_kept

NUM_CANDIDATES = 512
SHARE = 32
"""Ranks exchange at most one in so many tokens of the vocabulary: candidates take twice the bytes
of logits."""
_NO_TOKEN = 0x7FFFFFFF


def candidate_sample(
    logits: torch.Tensor, draws: Draws, filters: Filters, part: JoinedSlice | None = None
) -> torch.Tensor:
    """Draws from logits float32 [R, N], with every temperature above 0; returns int32 [R]. `part`:
    which tokens the logits are of; None: of all. All ranks call it with the same rows and return
    the same tokens."""
    part = part or JoinedSlice.whole(logits.shape[1])
    values, ids = part.likeliest(logits, _num_candidates(logits, filters, part))
    kept, overflowing = _kept(values, logits, draws, filters, part)
    scores = (values / draws.temperatures[:, None]) + gumbel_noise(_keys(draws), ids)
    scores.masked_fill_(~kept, -torch.inf)
    is_best = scores == scores.amax(1, keepdim=True)
    tokens = ids.masked_fill(~is_best, _NO_TOKEN).amin(1)
    if overflowing.any():
        some = draws.select(overflowing), _select_filters(filters, overflowing)
        tokens[overflowing] = draw_in_rounds(
            logits[overflowing], values[overflowing, 0], *some, part
        )
    return tokens


def _num_candidates(logits: torch.Tensor, filters: Filters, part: JoinedSlice) -> int:
    """Number of candidates: one more than the filters can keep, whose presence shows that they keep
    no others."""
    most = int(filters.top_ks.max()) + 1
    count = most if int(filters.top_ks.min()) > 0 else max(most, NUM_CANDIDATES)
    return min(
        count, part.vocab_size + 1 if part.is_whole(logits) else max(1, part.vocab_size // SHARE)
    )


def _kept(
    values: torch.Tensor, logits: torch.Tensor, draws: Draws, filters: Filters, part: JoinedSlice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates that the filters keep, bool [R, C], of their logits float32 [R, C], which are in
    descending order; and the rows bool [R] of which other tokens may be kept, or count."""
    count = values.shape[1]
    highests = values[:, 0].contiguous()
    leasts = least_kept(values[:, 0], draws, filters)
    kept = (values >= leasts[:, None]) & (values > -torch.inf)
    k = torch.where(filters.top_ks > 0, filters.top_ks, count).clamp(max=count).long()
    kept &= values >= values.gather(1, k[:, None] - 1)
    limits = filters.top_ps < 1
    overflowing = kept[:, -1].clone()
    if not limits.any():
        return kept, overflowing
    weights = _weights(values, highests, draws.temperatures).masked_fill_(~kept, 0)
    masses = weights.sum(1)
    # The mass that top-p counts is that of top-k's tokens, or, without top-k, of the whole row
    # above min-p's bound.
    wide = limits & (filters.top_ks == 0)
    if wide.any():
        some = [each[wide] for each in (logits, highests, draws.temperatures, leasts)]
        masses[wide] = part.total(row_weights(*some)[:, None])[:, 0]
    wanted = filters.top_ps.double() * masses.double()
    inside = kept & ((weights.cumsum(1) - weights).double() < wanted[:, None])
    lowest = values.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
    kept &= (values >= lowest) | ~limits[:, None]
    # Without all that top-k keeps, the mass is not known; that of a whole row is.
    return kept, torch.where(wide, kept[:, -1], overflowing)


def _weights(
    values: torch.Tensor, highests: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Whole weights int64 [R, C], with the bits that they have in sums over rows."""
    count = values.shape[1]
    tops, scales = (each.repeat_interleave(count) for each in (highests, temperatures))
    every = torch.full((values.numel(),), -torch.inf)
    return row_weights(values.reshape(-1, 1), tops, scales, every).view(values.shape)


def _keys(draws: Draws) -> torch.Tensor:
    return noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)


def _select_filters(filters: Filters, rows: torch.Tensor) -> Filters:
    return Filters(
        top_ks=filters.top_ks[rows], top_ps=filters.top_ps[rows], min_ps=filters.min_ps[rows]
    )
