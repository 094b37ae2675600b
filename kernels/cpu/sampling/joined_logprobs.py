"""Log probabilities on a CPU for rows of logits that may be divided over ranks, with the bits of
one process: the sum of weights does not depend on the order of additions."""

from __future__ import annotations

import math

import torch

from ...sampling.ordered_floats import SIGN, float_of, ordered
from ...sampling.vocabulary_slice import JoinedSlice
from ...sampling.weight_sums import ONE
from ..row_weights import row_weights

RANKED_AT_ONCE = 16
"""Rows whose tokens are ordered at the same time: that takes some twenty bytes for each token of
the vocabulary."""


def joined_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, part: JoinedSlice | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities float32 [R] of token_ids int32 [R] under logits float32 or bfloat16 [R, N];
    and ids int32 and log probabilities float32 [R, num_top] of the likeliest, smaller ids first
    among equals. `part`: which tokens the logits are of; None: of all. All ranks call it with the
    same rows and get the same."""
    part = part or JoinedSlice.whole(logits.shape[1])
    places = token_ids.long() - part.first_token
    is_own = (places >= 0) & (places < logits.shape[1])
    chosen = logits.gather(1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].float()
    own = torch.stack((logits.amax(1).float(), chosen.masked_fill(~is_own, -torch.inf)), dim=1)
    highests, chosen = part.highest(own).unbind(1)
    every = torch.full_like(highests, -torch.inf)
    ones = torch.ones_like(highests)
    totals = part.total(row_weights(logits, highests, ones, every)[:, None])[:, 0]
    # One by one: a vector's logarithm may depend on how long it is. A row with a NaN has no sum.
    sums = (total / ONE for total in totals.tolist())
    logs = torch.tensor(
        [math.log(each) if each > 0 else math.nan for each in sums], dtype=torch.float64
    )
    log_sums = highests.double() + logs
    values, ids = _likeliest(logits, num_top, part)
    return (chosen - log_sums).float(), ids, (values - log_sums[:, None]).float()


def _likeliest(
    logits: torch.Tensor, count: int, part: JoinedSlice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logits float32 [R, count], and their tokens int32, smaller ones first among
    equals."""
    tokens = torch.arange(part.first_token, part.first_token + logits.shape[1])
    pieces = (
        logits[at : at + RANKED_AT_ONCE].float() for at in range(0, len(logits), RANKED_AT_ONCE)
    )
    own = torch.cat(
        [_keys(piece, tokens).topk(min(count, logits.shape[1]), dim=1).values for piece in pieces]
    )
    padded = torch.full((len(logits), count), torch.iinfo(torch.int64).min)
    padded[:, : own.shape[1]] = own
    keys = part.join(padded).topk(count, dim=1).values
    return float_of(keys >> 32), (SIGN - (keys & SIGN)).int()


def _keys(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whole numbers int64 [R, N] that order tokens by logit, highest last, and by id, smallest
    last."""
    # The sum makes a zero of a negative zero, which equals it.
    return (ordered(logits + 0.0) << 32) | (SIGN - tokens)
