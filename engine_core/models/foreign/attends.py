"""Attention of a module's layers over the paged KV cache, and a stand-in for checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from ...layers.batch import ForwardBatch, LayerCaches
from ...layers.platform import Platform
from ...weights.model_config import ModelConfig
from .interface import AttentionCall
from .row_wise import RowWise


@dataclass(slots=True)
class PagedAttention:
    """See `Attends`: one forward pass of a batch."""

    platform: Platform
    mode: RowWise
    config: ModelConfig
    unrotated: torch.Tensor
    """Table of `rope.unrotated_table`, which rotates nothing: the library has rotated queries and
    keys."""
    batch: ForwardBatch
    kv_cache: LayerCaches
    plans: list[Any]
    """Attention plans, one of each page group."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        with self.mode.aside():
            cache = self.kv_cache[call.layer]
            batch = self.batch.of_layer(call.layer)
            group = self.batch.group_of_layer[call.layer] if self.batch.page_groups else 0
            heads = torch.cat((call.q, call.k, call.v), dim=1)
            size = heads.shape[-1]
            if size < cache.shape[-1]:
                heads = pad(heads, (0, cache.shape[-1] - size))
            qkv = heads.squeeze(0).transpose(0, 1).flatten(1)
            queries = self.platform.qk_norm_rope_store_kv(
                qkv, batch, self.unrotated, cache, bias=None, q_norm=None, k_norm=None, eps=0.0
            )
            capped: dict[str, Any] = {"softcap": call.softcap} if call.softcap else {}
            window = self.config.window_of(call.layer)
            attended = self.platform.attention(
                queries, cache, self.plans[group], scale=call.scale, window=window, **capped
            )
            return attended.view(1, *queries.shape)[..., :size]


@dataclass(slots=True)
class OwnValue:
    """See `Attends`: each token attends to itself only, so that its result depends on no other
    token."""

    mode: RowWise

    def attend(self, call: AttentionCall) -> torch.Tensor:
        with self.mode.aside():
            values = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1)
            return (call.q + values).transpose(1, 2).contiguous()
