"""Attention in which all tokens of a text see each other, without a cache. Sources: Devlin et al.,
"BERT", 2019; Song et al., "MPNet", 2020."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from ..linear.linear import Linear
from ..platform import EncoderPlatform, Platform

MAX_DISTANCE = 128
"""Distance from which on all tokens are in the last bucket."""


class MutualAttention:
    def __init__(
        self,
        platform: Platform,
        qkv: Linear,
        qkv_bias: torch.Tensor,
        o: Linear,
        o_bias: torch.Tensor,
        head_dim: int,
    ) -> None:
        """qkv [3 Hq D, H], qkv_bias [3 Hq D], o [H, Hq D], o_bias [H]"""
        self._platform = cast(EncoderPlatform, platform)
        self._head_dim = head_dim
        self._qkv = self._platform.biased_linear(qkv, qkv_bias, "")
        self._o = self._platform.biased_linear(o, o_bias, "")

    def __call__(
        self, x: torch.Tensor, texts: Any, distance_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, H] and the platform's plan of the texts → [T, H]; distance_bias as in
        `EncoderPlatform.mutual_attention`."""
        attended = self._platform.mutual_attention(
            self._qkv(x), texts, self._head_dim, distance_bias
        )
        return self._o(attended)


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
