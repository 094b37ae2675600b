"""Biases of attention in which all tokens of a text see each other, by their distance. Source: Song
et al., "MPNet", 2020."""

from __future__ import annotations

import math

import torch

MAX_DISTANCE = 128
"""Distance from which on all tokens are in the last bucket."""


def distance_bias(table: torch.Tensor, max_len: int) -> torch.Tensor:
    """Biases float32 [Hq, 2 max_len − 1] of the distances −(max_len − 1) … max_len − 1 from a query
    to a key, from a table [buckets, Hq]. The buckets are T5's (Raffel et al., 2020): half for each
    direction, and of each half one for each short distance and the rest on a logarithmic scale."""
    half = table.shape[0] // 2
    num_exact = half // 2
    distances = torch.arange(-(max_len - 1), max_len)
    lengths = distances.abs()
    logs = torch.log(lengths.clamp(min=1).float() / num_exact)
    logarithmic = logs / math.log(MAX_DISTANCE / num_exact) * (half - num_exact)
    far = (num_exact + logarithmic.to(torch.int64)).clamp(max=half - 1)
    buckets = torch.where(lengths < num_exact, lengths, far) + half * (distances > 0)
    return table.float()[buckets.to(table.device)].T.contiguous()
