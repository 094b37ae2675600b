"""Attention of libraries over our paged cache: cuDNN's through torch, and FlashInfer's where it is
installed.

cuDNN needs whole keys in one piece: they are gathered from the blocks, and a chunk on a cached
prefix is two calls whose results are merged. FlashInfer reads our blocks as they lie.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwater.kernels.attention.hopper_attention import is_hopper

from .attention_cases import HEAD_DIM, HEADS, KV_HEADS, PAGE, Batch, Planned, ints

WORKSPACE_BYTES = 512 << 20
INVARIANT_PAGES = 512 // PAGE
"""Number of pages in a split of decode, as long as ours: with a fixed length FlashInfer promises
bits that do not depend on the batch."""


def others(batch: Batch) -> dict[str, Planned]:
    """Libraries, by name, that serve this batch on this GPU."""
    planned = {}
    if not batch.decodes and len(set(zip(batch.counts, batch.lens, strict=True))) == 1:
        planned["cuDNN"] = cudnn(batch)
    if not has_flashinfer():
        return planned
    planned["FlashInfer fa2"] = flashinfer(batch, "fa2")
    if batch.decodes:
        planned["FlashInfer fa2, fixed splits"] = flashinfer(
            batch, "fa2", fixed_split_size=INVARIANT_PAGES
        )
    elif is_hopper(batch.q.device):
        planned["FlashInfer fa3"] = flashinfer(batch, "fa3")
    return planned


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def flashinfer(batch: Batch, backend: str, **options: int) -> Planned:
    """FlashInfer's attention: its wrapper for prompts, or its decode on matrix units, planned on
    the host."""
    library: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(batch.q)
    widths = [-(-length // PAGE) for length in batch.lens]
    pages = torch.cat([row[:width] for row, width in zip(batch.table, widths, strict=True)])
    ends = ints([0, *widths]).cumsum(0, dtype=torch.int32)
    where = ends, pages, ints([(length - 1) % PAGE + 1 for length in batch.lens])
    sizes = HEADS, KV_HEADS, HEAD_DIM, PAGE
    types = {"q_data_type": batch.q.dtype, "kv_data_type": batch.q.dtype}
    if batch.decodes:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend=backend
        )
        plan = partial(wrapper.plan, *where, *sizes, **types, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
        plan = partial(
            wrapper.plan, ints(batch.query_starts), *where, *sizes, causal=True, **types, **options
        )

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wrapper.run(batch.q, (k, v), out=out)
        return out

    plan()
    return Planned(attend, plan)


def cudnn(batch: Batch) -> Planned:
    """cuDNN's attention, for prompts of one length."""
    num = len(batch.counts)
    tokens = batch.counts[0]
    length = batch.lens[0]
    cached = batch.lens[0] - tokens
    q = batch.q.view(num, tokens, HEADS, HEAD_DIM).transpose(1, 2)
    blocks = batch.table.long()
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return cache[blocks].transpose(1, 2).reshape(num, KV_HEADS, -1, HEAD_DIM)[:, :, :length]

    def attend(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        k = gathered(k_cache)
        v = gathered(v_cache)
        if not cached:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)
        before = attention(q, k[:, :, :cached], v[:, :, :cached], None, True, 0.0, False, False)
        own = attention(q, k[:, :, cached:], v[:, :, cached:], None, True, 0.0, True, False)
        # Weights of the two by their sums of exponentials, whose logarithms the library gives.
        share = torch.sigmoid(before[1] - own[1]).to(q.dtype).view(num, HEADS, tokens, 1)
        return torch.lerp(own[0], before[0], share).transpose(1, 2).reshape(-1, HEADS, HEAD_DIM)

    return Planned(attend)
