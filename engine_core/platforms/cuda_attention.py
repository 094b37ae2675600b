"""Attention kernels of an NVIDIA GPU: the table of those that serve queries and a cache of a kind.
Each row of the table gives the same bits.

Knows nothing about how a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from headwater.kernels.attention import hopper_attention
from headwater.kernels.attention.decode_attention import decode_attention
from headwater.kernels.attention.decode_plan import FEW_ROWS, DecodePlan
from headwater.kernels.attention.hopper_decode_attention import hopper_decode_attention
from headwater.kernels.attention.hopper_decode_splits import WIDE_HEAD, hopper_decode_splits
from headwater.kernels.attention.hopper_prefill_attention import hopper_prefill_attention
from headwater.kernels.attention.hopper_shared_prefix_attention import (
    hopper_shared_prefix_attention,
)
from headwater.kernels.attention.hopper_wide_prefill import hopper_wide_prefill
from headwater.kernels.attention.paged_cache import bulk_copied, is_paired
from headwater.kernels.attention.prefill_attention import prefill_attention
from headwater.kernels.attention.reduce_splits import reduce_splits
from headwater.kernels.attention.shared_prefix_attention import shared_prefix_attention

Launcher = Callable[..., None]


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Launchers for one kind of queries and caches. Their arguments are those of
    `decode_attention`, `shared_prefix_attention` and `prefill_attention`; a Hopper kernel takes
    those that are `given`, where it supports them."""

    prefill: Launcher = prefill_attention
    shared: Launcher = shared_prefix_attention
    direct_decode: Launcher = decode_attention
    """Decode of plans without a work list."""
    few_decode: Launcher = decode_attention
    """Decode of as many rows as `FEW_ROWS` names."""
    decode: Launcher = decode_attention
    """Decode of any other number of rows."""

    def decode_of(self, plan: DecodePlan, num_rows: int) -> Launcher:
        if plan.is_direct:
            return self.direct_decode
        return self.few_decode if num_rows in FEW_ROWS else self.decode

    def attend_decodes(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        table_rows: torch.Tensor,
        block_tables: torch.Tensor,
        plan: DecodePlan,
        out: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        scale: float | None = None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        dependent: bool = False,
        early: bool = False,
    ) -> None:
        """Decode attention with the merge of its splits; `early` as in `reduce_splits`."""
        launch = self.decode_of(plan, len(q))
        launch(
            q,
            k_cache,
            v_cache,
            seq_lens,
            table_rows,
            block_tables,
            plan,
            out,
            scale=scale,
            dependent=dependent,
            **given(k_scale=k_scale, v_scale=v_scale, window=window or None),
            **given(softcap=softcap or None, sinks=sinks),
        )
        if launch not in MERGING:
            reduce_splits(
                seq_lens,
                plan,
                out,
                v_scale=v_scale,
                window=window,
                sinks=sinks,
                dependent=dependent,
                early=early,
            )


MERGING: tuple[Launcher, ...] = (hopper_decode_attention,)
"""Launchers whose kernel merges its splits."""
ANY_GPU = AttentionKernels()
HOPPER = AttentionKernels(
    prefill=hopper_prefill_attention,
    shared=hopper_shared_prefix_attention,
    direct_decode=hopper_decode_attention,
    few_decode=hopper_decode_splits,
)
HOPPER_WINDOW = AttentionKernels(
    prefill=hopper_prefill_attention, direct_decode=hopper_decode_attention
)
HOPPER_FP8 = AttentionKernels(prefill=hopper_prefill_attention)
HOPPER_WIDE_WINDOW = AttentionKernels(few_decode=hopper_decode_splits, decode=hopper_decode_splits)
HOPPER_WIDE = replace(HOPPER_WIDE_WINDOW, prefill=hopper_wide_prefill)


def attention_kernels(
    q: torch.Tensor, k_cache: torch.Tensor, *, window: int = 0, is_capped: bool = False
) -> AttentionKernels:
    """The table's row for queries [.., Hq, D] over a cache [num_blocks, Hk, block_size, D] in a
    layer with this window, 0 for none; `is_capped`: whether its scores are."""
    if is_capped:
        return ANY_GPU
    if q.dtype == k_cache.dtype and is_read_by_hopper(k_cache):
        return HOPPER_WINDOW if window else HOPPER
    if q.dtype == k_cache.dtype and _is_ringed(k_cache, WIDE_HEAD):
        return HOPPER_WIDE_WINDOW if window else HOPPER_WIDE
    if window:
        return ANY_GPU
    return HOPPER_FP8 if _is_widened(q, k_cache) else ANY_GPU


def is_read_by_hopper(k_cache: torch.Tensor) -> bool:
    """Whether the kernels for Hopper compute all attention of queries of this cache's type
    [num_blocks, Hk, block_size, D]."""
    return _is_ringed(k_cache, 64, 128)


def _is_ringed(k_cache: torch.Tensor, *head_dims: int) -> bool:
    """Whether heads of the cache have one of these sizes, and kernels for Hopper copy them into
    rings as they are."""
    return (
        k_cache.dtype == torch.bfloat16
        and k_cache.shape[3] in head_dims
        and bulk_copied(k_cache)
        and hopper_attention.is_hopper(k_cache.device)
    )


def _is_widened(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether `hopper_rings.widen_tiles` serves these queries and this fp8 cache: a part of a head
    is a line of shared memory."""
    return (
        q.dtype == torch.bfloat16
        and is_paired(k_cache)
        and q.shape[2] == 128
        and bulk_copied(k_cache)
        and hopper_attention.is_hopper(q.device)
    )


def given(**options: Any) -> dict[str, Any]:
    """Options that are not None. Kernels without scales or a window do not take these."""
    return {name: value for name, value in options.items() if value is not None}
