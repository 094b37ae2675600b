"""Times attention over latents, of decoding rows and of prompts, beside what memory and arithmetic
allow: figures of `gpu_kernels`.

A latent of 576 numbers is read once for all heads, so decode of few heads is bound by memory and
decode of many by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headwater.engine_core.layers.platform import IndexedQueries
from headwater.engine_core.platforms.latents.cuda import (
    CudaIndexedAttention,
    CudaLatentAttention,
    latent_kernels,
)
from headwater.engine_core.platforms.latents.cuda_plans import ChosenWorkspace
from headwater.kernels.attention.reduce_splits import reduce_splits
from headwater.kernels.latent.hopper_latent_attention import RANK, ROTARY
from headwater.kernels.latent.latent_attention import list_row_tiles, room_for_totals
from headwater.kernels.latent.latent_plan import LatentPlan, plan_latents
from headwater.kernels.launch.device import upload

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed

WIDTH = RANK + ROTARY
PAGE = 64
SCALE = 0.05
DECODES = (
    (128, 64, 8192),
    (20, 64, 8192),
    (16, 64, 8192),
    (20, 64, 512),
    (20, 1, 8192),
    (20, 1, 65_536),
    (128, 1, 65_536),
)
"""Heads, rows and latents of each: heads of DeepSeek-V3, of GLM-4.7-Flash and of V2-Lite."""
PROMPTS = ((20, 8192), (128, 4096))
"""Heads and tokens."""
INDEXED = ((128, 64, 16, 65_536), (64, 32, 16, 65_536), (64, 32, 1, 65_536))
"""Heads of queries and of indexers, rows and latents: those of DeepSeek V3.2 and of GLM-5."""
INDEX_DIM = 128
NUM_CHOSEN = 2048
HEAD_DIM = 128


def latent_attention() -> Iterator[Figure]:
    for num_heads, num_rows, context in DECODES:
        yield _decode(num_heads, num_rows, context)
        torch.cuda.empty_cache()
    for num_heads, num_tokens in PROMPTS:
        yield _prefill(num_heads, num_tokens)
        torch.cuda.empty_cache()
    for case in INDEXED:
        yield _indexed(*case)
        torch.cuda.empty_cache()


def flops_of(num_heads: int, num_pairs: float) -> float:
    """Operations of attention of queries to so many latents together."""
    return 2 * num_pairs * num_heads * (WIDTH + RANK)


def _decode(num_heads: int, num_rows: int, context: int) -> Figure:
    """A layer's attention with its merge."""
    lens = _ints([context] * num_rows)
    rows = _ints(list(range(num_rows)))
    plan = LatentPlan.allocate(
        max_rows=num_rows,
        max_seq_len=context,
        num_heads=num_heads,
        rank=RANK,
        device=lens.device,
    )
    plan_latents(plan, lens)
    num_bytes = 2 * num_rows * context * WIDTH
    table = _table(num_rows, context)

    def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        kernels = latent_kernels(q, cache, RANK)
        kernels.decode(q, cache, lens, rows, table, plan, out, scale=SCALE)
        reduce_splits(lens, plan, out)

    calls = []
    for _ in range(copies_for(num_bytes)):
        q = randn(num_rows, num_heads, WIDTH)
        cache = randn(int(table.max()) + 1, PAGE, WIDTH)
        calls.append(partial(attend, q, cache, torch.empty_like(q[..., :RANK])))
    flops = flops_of(num_heads, num_rows * context)
    case = f"{num_heads} heads, {num_rows} x {context}"
    return _figure("latent decode", case, timed(calls), flops, num_bytes)


def _indexed(num_heads: int, num_index_heads: int, num_rows: int, context: int) -> Figure:
    """A layer's choice of latents and attention to them, with the products of its heads."""
    table = _table(num_rows, context)
    rows = _ints(list(range(num_rows)))
    workspace = ChosenWorkspace(num_heads, RANK, NUM_CHOSEN, rows.device)
    kv_b = randn(num_heads, 2 * HEAD_DIM, RANK) / RANK**0.5
    over_all = CudaLatentAttention(kv_b, SCALE, room_for_totals(RANK, rows.device))
    attention = CudaIndexedAttention(over_all, workspace, NUM_CHOSEN)
    queries = IndexedQueries(
        randn(num_rows, num_heads, HEAD_DIM + ROTARY),
        randn(num_rows, num_index_heads, INDEX_DIM),
        randn(num_rows, num_index_heads).float(),
    )
    tokens = torch.stack((torch.full_like(rows, context), rows, torch.full_like(rows, NUM_CHOSEN)))
    cache = randn(int(table.max()) + 1, PAGE, WIDTH + INDEX_DIM)
    call = partial(attention.of_tokens, queries, cache, tokens, table)
    flops = flops_of(num_heads, num_rows * NUM_CHOSEN)
    flops += 2 * num_rows * context * num_index_heads * INDEX_DIM
    num_bytes = 2 * num_rows * (context * INDEX_DIM + NUM_CHOSEN * WIDTH)
    case = f"{num_heads} heads, {num_index_heads} of an indexer, {num_rows} x {context}"
    return _figure("indexed decode", case, timed([call, call]), flops, num_bytes)


def _prefill(num_heads: int, num_tokens: int) -> Figure:
    """A layer's attention of a whole prompt."""
    q = randn(num_tokens, num_heads, WIDTH)
    table = _table(1, num_tokens)
    cache = randn(int(table.max()) + 1, PAGE, WIDTH)
    call = partial(
        latent_kernels(q, cache, RANK).prefill,
        q,
        cache,
        _ints([0, num_tokens]),
        _ints([num_tokens]),
        _ints([0]),
        table,
        upload(list_row_tiles([num_tokens], [0], num_heads), q.device),
        room_for_totals(RANK, q.device),
        torch.empty_like(q[..., :RANK]),
        scale=SCALE,
    )
    flops = flops_of(num_heads, num_tokens * (num_tokens + 1) / 2)
    case = f"{num_heads} heads, prompt of {num_tokens}"
    return _figure("latent prefill", case, timed([call]), flops, 2 * num_tokens * WIDTH)


def _figure(kernel: str, case: str, us: float, flops: float, num_bytes: int) -> Figure:
    limit = max(flops / FLOPS_PER_US, num_bytes / BYTES_PER_US)
    note = f"{flops / us / 1e6:.0f} TFLOP/s, {num_bytes / us / 1e3:.0f} GB/s"
    return Figure(kernel, case, us, limit, note)


def _table(num_rows: int, context: int) -> torch.Tensor:
    """Shuffled blocks, of which none is the first."""
    width = -(-context // PAGE)
    blocks = torch.randperm(num_rows * width, device="cuda") + 1
    return blocks.view(num_rows, width).int()


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")
