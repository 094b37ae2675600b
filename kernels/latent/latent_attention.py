"""Attention over paged latents for any GPU: one vector a token, whose first `rank` numbers are the
values of all heads, and which as a whole is their key.

Queries are absorbed, of decoding rows and of prompts alike. A row walks its latents in splits of
512, a split in tiles of `latent_tiles.KEYS`, and splits are merged first to last, so a row has the
same bits however its text was computed. `hopper_latent_attention` computes the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..attention.online_softmax import SPLIT, base_2_scale, finish, merge_states, row_sums
from ..launch.device import num_multiprocessors
from .latent_plan import ROWS, LatentPlan
from .latent_tiles import KEYS, attend_latents
from .latent_walk import piece_at, places_of

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
SMALLEST = 16
"""Smallest side of a product."""
FEW_ROWS = 16
"""Query rows of a program, which shares the tile of 64 with others: any GPU has room for so
many."""


def list_row_tiles(
    counts: Sequence[int] | Int32Array, starts: Sequence[int] | Int32Array, num_heads: int
) -> Int32Array:
    """Work list of prompts' chunks on the host, int32 [tiles, 2]: sequence, and first query row of
    the tile within its chunk, longest first. counts and starts: tokens computed of each sequence
    and position of the first. A tile whose sequence is negative is skipped."""
    num_rows = np.asarray(counts, np.int32) * num_heads
    num_tiles = -(-num_rows // ROWS)
    sequences = np.repeat(np.arange(len(num_tiles), dtype=np.int32), num_tiles)
    before = np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    firsts = (np.arange(len(sequences)) - before) * ROWS
    reach = np.asarray(starts, np.int32)[sequences] + firsts // num_heads
    tiles: Int32Array = np.stack((sequences, firsts), axis=1, dtype=np.int32)[
        np.argsort(-reach, kind="stable")
    ]
    return tiles


def room_for_totals(rank: int, device: torch.device) -> torch.Tensor:
    """Merged splits of the tiles that prefill computes at once, float32 [rows, rank]."""
    rows = num_multiprocessors(device) * ROWS
    return torch.zeros(rows, rank, dtype=torch.float32, device=device)


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    plan: LatentPlan,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attention of absorbed queries q [R, Hq, rank + rotary] into out [R, Hq, rank]; cache
    [num_blocks, block_size, rank + rotary], of their dtype or e4m3. seq_lens int32 [R]: latents
    that a row reads, its own included; table_rows int32 [R] into block_tables int32 [rows,
    max_blocks]. The plan is one of these lengths. scale is that of the softmax. Rows of length 0
    are left alone. `reduce_splits` follows."""
    num_heads = q.shape[1]
    _launch(
        plan.num_ranges * triton.cdiv(num_heads, ROWS),
        q,
        cache,
        (plan.range_starts, plan.row_of_split, plan.first_partials, seq_lens, table_rows, seq_lens),
        block_tables,
        plan.num_ranges,
        (plan.totals, plan.partial_acc, plan.partial_ml),
        out,
        scale,
        DECODES=True,
    )


def latent_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    totals: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attention of the chunks of S sequences, absorbed queries q [T, Hq, rank + rotary], into out
    [T, Hq, rank]; sequence i has the tokens query_starts[i] … query_starts[i + 1] - 1, int32
    [S + 1], and seq_lens[i] latents, of which its chunk is the end. tiles of `list_row_tiles`;
    totals of `room_for_totals`; the rest as in `latent_decode`."""
    if len(tiles) == 0:
        return
    _launch(
        min(num_multiprocessors(q.device), len(tiles)),
        q,
        cache,
        (seq_lens, tiles, seq_lens, seq_lens, table_rows, query_starts),
        block_tables,
        len(tiles),
        (totals, totals, totals),
        out,
        scale,
        DECODES=False,
    )


def _launch(
    num_programs: int,
    q: torch.Tensor,
    cache: torch.Tensor,
    walk: tuple[torch.Tensor, ...],
    block_tables: torch.Tensor,
    num_parts: int,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    scale: float,
    **constants: Any,
) -> None:
    rank = out.shape[2]
    rotary = q.shape[2] - rank
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert cache.shape[2] == q.shape[2]
    _attend_latents[(num_programs, ROWS // FEW_ROWS)](
        q,
        cache,
        *walk,
        block_tables,
        *partials,
        out,
        base_2_scale(scale, q.shape[2]),
        cache.stride(0),
        block_tables.stride(0),
        num_parts,
        stride_slot=cache.stride(1),
        HEADS=q.shape[1],
        RANK=rank,
        BLOCK_RANK=max(triton.next_power_of_2(rank), SMALLEST),
        ROTARY=rotary,
        BLOCK_ROTARY=max(triton.next_power_of_2(rotary), SMALLEST),
        PAGE=cache.shape[1],
        SPLIT=SPLIT,
        KEYS=KEYS,
        ROWS=FEW_ROWS,
        **constants,
        num_warps=4,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["num_parts"])
def _attend_latents(
    p_q,
    p_cache,
    p_start,
    p_item,
    p_first,
    p_seq_len,
    p_table_row,
    p_query_start,
    p_table,
    p_total,
    p_partial,
    p_ml,
    p_out,
    qk_scale,
    stride_block,
    stride_table,
    num_parts,
    stride_slot: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    DECODES: tl.constexpr,
):
    walk = (p_start, p_item, p_first, p_seq_len, p_table_row, p_query_start, num_parts)
    first_row = tl.program_id(1) * ROWS
    o_r = first_row + tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK_RANK)
    o_t = tl.arange(0, BLOCK_ROTARY)
    is_c = (o_c < RANK)[None, :]
    is_t = (o_t < ROTARY)[None, :]
    place, last = places_of(walk, HEADS, DECODES)
    while place < last:
        rows, context, table_row, keys, partial, is_whole, place = piece_at(
            walk, place, last, HEADS, SPLIT, DECODES
        )
        first, end = keys
        if (first < end) & (first_row < rows[1]):
            is_row = (o_r < rows[1])[:, None]
            p_row = p_table + table_row.to(tl.int64) * stride_table
            p_rows = p_q + (rows[0] + o_r).to(tl.int64)[:, None] * (RANK + ROTARY)
            b_q = (
                tl.load(p_rows + o_c[None, :], mask=is_row & is_c, other=0.0),
                tl.load(p_rows + RANK + o_t[None, :], mask=is_row & is_t, other=0.0),
            )
            b_position = (context + (rows[2] + o_r) // HEADS)[:, None]
            o_total = (tl.program_id(0) * 64 + o_r).to(tl.int64)
            p_totals = p_total + o_total[:, None] * RANK + o_c[None, :]
            b_m, b_left, b_right, b_acc = _fresh(ROWS, BLOCK_RANK)
            b_m_all = b_m
            b_l_all = tl.zeros((ROWS,), tl.float32)
            for i_n in range(first, end, 2 * KEYS):
                if (i_n > first) & (i_n % SPLIT == 0):
                    has_total = is_row & is_c & (i_n - first > SPLIT)
                    b_total = tl.load(p_totals, mask=has_total, other=0.0)
                    b_l = row_sums(b_left) + row_sums(b_right)
                    b_m_all, b_l_all, b_total = merge_states(
                        b_m_all, b_l_all, b_total, b_m, b_l, b_acc
                    )
                    tl.store(p_totals, b_total, mask=is_row & is_c)
                    b_m, b_left, b_right, b_acc = _fresh(ROWS, BLOCK_RANK)
                for i in tl.static_range(2):
                    o_n = i_n + i * KEYS + tl.arange(0, KEYS)
                    b_block = tl.load(p_row + tl.minimum(o_n, end - 1) // PAGE).to(tl.int64)
                    p_latents = (
                        p_cache + (b_block * stride_block + o_n % PAGE * stride_slot)[:, None]
                    )
                    is_key = (o_n < end)[:, None]
                    latents = (
                        tl.load(p_latents + o_c[None, :], mask=is_key & is_c, other=0.0),
                        tl.load(p_latents + RANK + o_t[None, :], mask=is_key & is_t, other=0.0),
                    )
                    latents = (latents[0].to(b_q[0].dtype), latents[1].to(b_q[1].dtype))
                    visible = (o_n < end)[None, :] & (o_n[None, :] <= b_position)
                    b_m, b_left, b_right, b_acc = attend_latents(
                        b_q, latents, visible, qk_scale, b_m, b_left, b_right, b_acc
                    )
                    # Tiles alternate between two sums: the next tile adds to the other one.
                    b_l = b_left
                    b_left = b_right
                    b_right = b_l
            has_total = is_row & is_c & (end - first > SPLIT)
            b_total = tl.load(p_totals, mask=has_total, other=0.0)
            b_l = row_sums(b_left) + row_sums(b_right)
            b_m, b_l_all, b_acc = merge_states(b_m_all, b_l_all, b_total, b_m, b_l, b_acc)
            if is_whole:
                p_outs = p_out + (rows[0] + o_r).to(tl.int64)[:, None] * RANK + o_c[None, :]
                b_out = finish(b_l_all, b_acc, 1.0).to(p_out.dtype.element_ty)
                tl.store(p_outs, b_out, mask=is_row & is_c)
            else:
                o_partial = (partial + o_r).to(tl.int64)
                p_partials = p_partial + o_partial[:, None] * RANK + o_c[None, :]
                tl.store(p_partials, b_acc, mask=is_row & is_c)
                tl.store(p_ml + o_partial * 2, b_m, mask=o_r < rows[1])
                tl.store(p_ml + o_partial * 2 + 1, b_l_all, mask=o_r < rows[1])


@triton.jit
def _fresh(ROWS: tl.constexpr, BLOCK_RANK: tl.constexpr):
    """State of a split without keys: maxima, columns of the sums of both tiles of a pair, and
    values."""
    b_l = tl.zeros((ROWS, 16), tl.float32)
    b_acc = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
    return tl.full((ROWS,), float("-inf"), tl.float32), b_l, b_l, b_acc
