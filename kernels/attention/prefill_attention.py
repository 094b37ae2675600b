"""Attention of prompt chunks over paged keys and values, their own included: all is read back from
the cache.

A tile is 64 query rows (128 on Hopper), tokens times the heads of a group, of one sequence. Splits
of 512 keys are merged as decode merges them, so a token that is computed again has the bits its
decode step had. With a sliding window, tiles of keys before that of all rows are not read.
`hopper_prefill_attention` computes the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..launch.device import upload
from .decode_attention import attention_of_rows
from .hopper_attention import ROWS, num_teams
from .online_softmax import (
    attend_tile,
    base_2_scale,
    finish,
    first_keys,
    fresh_state,
    joined,
    merge_states,
    narrowing,
    oldest_key,
    parts_of,
    row_sums,
    stages_of,
    with_sinks,
)
from .paged_cache import (
    as_operand,
    as_pairs,
    attention_constants,
    bulk_copied,
    head_bytes,
    load_tile,
    pages_of,
)

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
NUM_STAGES = 2


def tokens_per_tile(group: int, device: torch.device) -> int:
    """Number of tokens in a tile; `group` is the number of query heads of a key head."""
    return num_teams(device) * (ROWS // group)


def list_tiles(
    counts: Sequence[int] | Int32Array, starts: Sequence[int] | Int32Array, per_tile: int
) -> Int32Array:
    """Work list of a step on the host, int32 [tiles, 2]: sequence and first token of the tile
    within its chunk, longest first. counts and starts: tokens computed of each sequence and
    position of the first."""
    num_tiles = -(-np.asarray(counts, np.int32) // per_tile)
    sequences = np.repeat(np.arange(len(num_tiles), dtype=np.int32), num_tiles)
    firsts = (
        np.arange(len(sequences)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    ) * per_tile
    reach = np.asarray(starts, np.int32)[sequences] + firsts
    tiles: Int32Array = np.stack((sequences, firsts), axis=1, dtype=np.int32)[
        np.argsort(-reach, kind="stable")
    ]
    return tiles


def prefill_tiles(
    counts: Sequence[int], starts: Sequence[int], group: int, device: torch.device
) -> torch.Tensor:
    """`list_tiles` on the device, int32. A tile whose sequence is negative is skipped, for lists of
    fixed size."""
    return upload(list_tiles(counts, starts, tokens_per_tile(group, device)), device)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    tile_tokens: int = 0,
) -> None:
    """Attention of q [T, Hq, D] into out of the same shape; sequence i has rows query_starts[i] …
    query_starts[i + 1] - 1, int32 [S + 1].

    seq_lens int32 [S]: keys in the cache, the chunk's own included; the chunk is the end of them.
    table_rows int32 [S] into block_tables int32 [rows, max_blocks]; tiles from `prefill_tiles`;
    k_scale and v_scale float32 [Hk] for fp8 caches. scale is that of the softmax, 1 / sqrt(D) by
    default. A position sees the last `window` keys, its own included, or all up to its own; with a
    negative one those of its chunk of −window positions. Sinks and softcap as in
    `decode_attention`. tile_tokens: tokens of a tile in the list, where it was made for another
    number of query heads of a key head; 0: it was made for this one. Programs that have no rows for
    all tokens of a tile divide it.
    """
    num_kv_heads = k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[1]
    assert q.is_contiguous()
    assert out.is_contiguous()
    if len(tiles) == 0:
        return
    teams = num_teams(q.device)
    constants = attention_constants(q, k_cache)
    num_bytes = head_bytes(q, k_cache)
    rows = teams * ROWS // narrowing(num_bytes)
    tokens = min(teams * (ROWS // group), rows // group)
    listed = tile_tokens or tokens_per_tile(group, q.device)
    parts = triton.cdiv(listed, tokens)
    _prefill_tiles[(len(tiles) * parts, num_kv_heads)](
        q,
        as_operand(k_cache, constants["HALF"]),
        as_operand(v_cache, constants["HALF"]),
        block_tables,
        table_rows,
        query_starts,
        seq_lens,
        tiles,
        out,
        seq_lens if k_scale is None else k_scale,
        seq_lens if v_scale is None else v_scale,
        sinks,
        base_2_scale(scale, q.shape[2]),
        *as_pairs(k_cache).stride()[:3],
        block_tables.stride(0),
        **constants,
        ROWS=rows,
        TOKENS=tokens,
        LISTED=listed,
        PARTS=parts,
        WINDOW=window,
        SOFTCAP=softcap,
        BULK=bulk_copied(k_cache),
        num_warps=4 * teams,
        num_stages=stages_of(NUM_STAGES, num_bytes),
    )


def prefill_attention_twin(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attention in plain torch, one sequence after another, in q's precision or float32, whichever
    is higher. Options as in `attention_of_rows`."""
    bounds = query_starts.tolist()
    caches = (k_cache, v_cache)
    chunks = [
        attention_of_rows(
            q[first:end], *caches, block_tables[int(table_rows[i])], int(seq_lens[i]), **options
        )
        for i, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    return torch.cat(chunks)


@triton.jit
def _prefill_tiles(
    p_q,
    k,
    v,
    p_table,
    p_table_row,
    p_query_start,
    p_seq_len,
    p_tile,
    p_out,
    p_k_scale,
    p_v_scale,
    p_sinks,
    qk_scale,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    BLOCK_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    LISTED: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BULK: tl.constexpr,
    FP8: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_tile = tl.program_id(0) // PARTS
    i_kv = tl.program_id(1)
    i_seq = tl.load(p_tile + i_tile * 2)
    if i_seq < 0:
        return
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, HEAD_DIM)
    query_start = tl.load(p_query_start + i_seq)
    count = tl.load(p_query_start + i_seq + 1) - query_start
    context = tl.load(p_seq_len + i_seq) - count
    first_token = tl.load(p_tile + i_tile * 2 + 1)
    tile_end = tl.minimum(first_token + LISTED, count)
    if PARTS > 1:
        first_token += tl.program_id(0) % PARTS * TOKENS
        if first_token >= tile_end:
            return
    last_token = tl.minimum(first_token + TOKENS, tile_end) - 1
    b_token = first_token + o_r // GROUP
    is_row = (b_token <= last_token) & (o_r < TOKENS * GROUP)
    b_position = context + b_token
    end = context + last_token + 1
    # Every row of the tile sees every key before this one.
    clear = context + first_token + 1

    if FP8:
        qk_scale = qk_scale * tl.load(p_k_scale + i_kv)
        v_scale = tl.load(p_v_scale + i_kv)
    else:
        v_scale = 1.0
    p_row = p_table + tl.load(p_table_row + i_seq).to(tl.int64) * stride_table
    o_q = (query_start + b_token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + i_kv * GROUP + o_r % GROUP
    o_q = o_q[:, None] * HEAD_DIM + o_d[None, :]
    b_q = parts_of(tl.load(p_q + o_q, mask=is_row[:, None], other=0.0), FP8)

    b_m, _, b_acc = fresh_state(ROWS, HEAD_DIM, False)
    state = (b_m, tl.zeros((ROWS,), tl.float32), joined(b_acc))
    begin, _ = first_keys(0, clear, WINDOW, SPLIT)
    # All rows see all keys of the splits from `inner` to `whole`.
    inner = begin
    if WINDOW:
        inner = tl.cdiv(oldest_key(end - 1, WINDOW), SPLIT) * SPLIT
    whole = tl.maximum(clear // SPLIT * SPLIT, inner)
    cache = (k, v, p_row, i_kv, stride_block, stride_head, stride_slot)
    tiles: tl.constexpr = (BLOCK_ROWS, HEAD_DIM, PAGE, HALF, BULK, FP8)
    shape: tl.constexpr = (SPLIT, TILE, tiles, WINDOW, SOFTCAP, ON_GPU)
    rows = (b_q, b_position, qk_scale, clear, end)
    pages = pages_of(p_row, first_keys(0, clear, WINDOW, TILE)[0], end, PAGE, HALF)
    if WINDOW:
        for first in range(begin, tl.minimum(inner, end), SPLIT):
            state, pages = _add_split(cache, pages, rows, first, state, shape, True)
    for first in range(inner, whole, SPLIT):
        state, pages = _add_split(cache, pages, rows, first, state, shape, False)
    for first in range(whole, end, SPLIT):
        state, pages = _add_split(cache, pages, rows, first, state, shape, True)
    b_m, b_l, b_acc = state
    b_l = with_sinks(b_m, b_l, p_sinks, i_kv * GROUP + o_r % GROUP, is_row)
    b_out = finish(b_l, b_acc, v_scale)
    tl.store(p_out + o_q, b_out.to(p_out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _add_split(cache, pages, rows, first, state, shape: tl.constexpr, MASKED: tl.constexpr):
    """State of the splits before, merged with that of the split from position `first` on, and the
    blocks of the tile behind it. MASKED: some row does not see all of its keys."""
    b_q, b_position, qk_scale, clear, end = rows
    SPLIT: tl.constexpr = shape[0]
    TILE: tl.constexpr = shape[1]
    tiles: tl.constexpr = shape[2]
    WINDOW: tl.constexpr = shape[3]
    HEAD_DIM: tl.constexpr = tiles[1]
    PAGE: tl.constexpr = tiles[2]
    HALF: tl.constexpr = tiles[3]
    b_m, b_l, b_acc = fresh_state(b_position.shape[0], HEAD_DIM, tiles[5])
    start = first
    stop = first + SPLIT
    if MASKED:
        start, _ = first_keys(first, clear, WINDOW, TILE)
        stop = tl.minimum(stop, end)
    for i_n in range(start, stop, TILE):
        keys, values = load_tile(cache, pages, i_n, end, tiles, shape[5])
        pages = pages_of(cache[2], i_n + TILE, end, PAGE, HALF)
        visible = (True, True)
        if MASKED:
            o_n = i_n + tl.arange(0, HALF)[None, :]
            visible = (o_n <= b_position[:, None], o_n + HALF <= b_position[:, None])
            if WINDOW:
                b_oldest = oldest_key(b_position, WINDOW)[:, None]
                visible = (visible[0] & (o_n >= b_oldest), visible[1] & (o_n + HALF >= b_oldest))
        b_m, b_l, b_acc = attend_tile(
            b_q, keys, values, visible, qk_scale, b_m, b_l, b_acc, MASKED, shape[4]
        )
    merged = merge_states(state[0], state[1], state[2], b_m, row_sums(b_l), joined(b_acc))
    return merged, pages
