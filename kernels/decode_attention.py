"""Attention of one new token a sequence over its paged keys and values: splits of 512 keys, merged first to last.

The heads of a group share one read of their keys. Work items come from `decode_plan`; splits that several rows share
are read by `shared_prefix_attention` into the same partial results, so sharing changes no bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from headwater.kernels.decode_plan import DecodePlan
from headwater.kernels.dependent_launch import launch_options, release_dependents, wait_for_inputs
from headwater.kernels.hopper_attention import serves
from headwater.kernels.hopper_decode_attention import hopper_decode_attention
from headwater.kernels.online_softmax import (
    HALF,
    LOG2_E,
    SPLIT,
    TILE,
    attend_tile,
    finish,
    fresh_state,
    merge_states,
    row_sums,
)
from headwater.kernels.paged_cache import load_tile

MAX_PROGRAMS = 8448
"""64 programs for each of 132 multiprocessors; items beyond them are walked in strides."""
DIRECT_ROWS = 4
"""Up to this many rows programs find their split by arithmetic and load no work list before the first key."""
NUM_STAGES = 2


def decode_attention(
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
    dependent: bool = False,
) -> bool:
    """q [R, Hq, D] and out alike; caches [num_blocks, Hk, block_size, D]; the rest as `plan_decode` had it.

    Scales float32 [Hk] for fp8 caches. Rows whose length is 0 are left alone. Returns
    whether `reduce_splits` must follow.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    assert SPLIT % block_size == 0
    assert q.is_contiguous()
    assert out.is_contiguous()
    if k_scale is None and is_direct(plan) and serves(q, k_cache):
        hopper_decode_attention(q, k_cache, v_cache, seq_lens, table_rows, block_tables, plan, out, dependent=dependent)
        return False
    num_programs = min(num_rows * min(plan.max_splits, 64), max(MAX_PROGRAMS // num_kv_heads, 1))
    _decode_splits[(num_programs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        table_rows,
        seq_lens,
        plan.counts,
        plan.items,
        plan.tails,
        plan.first_partials,
        plan.partial_acc,
        plan.partial_ml,
        out,
        seq_lens if k_scale is None else k_scale,
        seq_lens if v_scale is None else v_scale,
        LOG2_E / math.sqrt(head_dim),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        num_rows,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        SPLIT=SPLIT,
        TILE=TILE,
        HALF=HALF,
        FP8=k_scale is not None,
        MAX_SPLITS=plan.max_splits,
        DIRECT=is_direct(plan),
        ON_GPU=q.is_cuda,
        DEPENDENT=dependent,
        num_warps=4,
        num_stages=NUM_STAGES,
        **launch_options(dependent),
    )
    return True


def is_direct(plan: DecodePlan) -> bool:
    """Whether decode with this plan needs no work list: `plan_decode` may be left out if nothing is shared."""
    return plan.max_rows <= DIRECT_ROWS


def reduce_splits(
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    *,
    v_scale: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Merges the partial results of rows with more than one split into out [R, Hq, D]."""
    num_rows, num_q_heads, head_dim = out.shape
    heads = 8 if num_rows * num_q_heads >= 4096 and num_q_heads % 8 == 0 else 1
    _reduce_splits[(num_rows, num_q_heads // heads)](
        seq_lens,
        plan.first_partials,
        plan.partial_acc,
        plan.partial_ml,
        out,
        seq_lens if v_scale is None else v_scale,
        NUM_Q_HEADS=num_q_heads,
        GROUP=1 if v_scale is None else num_q_heads // len(v_scale),
        HEAD_DIM=head_dim,
        HEADS=heads,
        SPLIT=SPLIT,
        UNROLL=4 if heads > 1 else 16,
        MAX_SPLITS=plan.max_splits,
        DIRECT=is_direct(plan),
        HAS_SCALE=v_scale is not None,
        DEPENDENT=dependent,
        num_warps=4 if heads > 1 else 1,
        **launch_options(dependent),
    )


def decode_attention_twin(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """Plain torch, one row after another, in q's precision or float32, whichever is higher; caches already unscaled."""
    return torch.stack(
        [
            attention_of_rows(q[i : i + 1], k_cache, v_cache, block_tables[int(table_rows[i])], int(seq_lens[i]))[0]
            for i in range(len(q))
        ]
    )


def attention_of_rows(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int
) -> torch.Tensor:
    """The last len(q) positions of one sequence of seq_len keys, each seeing the keys up to its own; [C, Hq, D]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    blocks = block_table[: triton.cdiv(seq_len, k_cache.shape[2])].long()
    k, v = (c[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].to(dtype) for c in (k_cache, v_cache))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("chd,nhd->hcn", q.to(dtype), k) / math.sqrt(q.shape[2])
    positions = torch.arange(seq_len - len(q), seq_len, device=q.device)
    hidden = torch.arange(seq_len, device=q.device)[None, :] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hcn,nhd->chd", weights, v)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_splits(
    p_q,
    p_k,
    p_v,
    p_table,
    p_table_row,
    p_seq_len,
    p_count,
    p_item,
    p_tail,
    p_first_partial,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_k_scale,
    p_v_scale,
    qk_scale,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    FP8: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
    ON_GPU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    ROWS: tl.constexpr = 16
    tl.static_assert(GROUP <= ROWS)
    i_kv = tl.program_id(1)
    o_h = tl.arange(0, ROWS)
    o_d = tl.arange(0, HEAD_DIM)
    b_head = i_kv * GROUP + o_h
    is_head = o_h < GROUP
    v_scale = 1.0
    if FP8:
        qk_scale = qk_scale * tl.load(p_k_scale + i_kv)
        v_scale = tl.load(p_v_scale + i_kv)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    if DIRECT:
        num_whole = num_rows * MAX_SPLITS
        num_items = num_whole
    else:
        num_whole = tl.load(p_count)
        num_items = num_whole + tl.load(p_count + 1)
    for i_item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        if DIRECT:
            i_row, i_split = i_item // MAX_SPLITS, i_item % MAX_SPLITS
        else:
            item = tl.load(p_item + i_item) if i_item < num_whole else tl.load(p_tail + i_item - num_whole)
            i_row, i_split = item >> 16, item & 0xFFFF
        seq_len = tl.load(p_seq_len + i_row)
        first = i_split * SPLIT
        end = tl.minimum(first + SPLIT, seq_len)
        is_split = first < seq_len
        p_row = p_table + tl.load(p_table_row + i_row).to(tl.int64) * stride_table

        o_q = (i_row * (NUM_KV_HEADS * GROUP) + b_head) * HEAD_DIM
        b_q = tl.load(p_q + o_q[:, None] + o_d[None, :], mask=is_head[:, None], other=0.0)
        if FP8:
            b_q = b_q.to(tl.float16)
        b_m, b_l, b_acc = fresh_state(ROWS, HEAD_DIM)
        for i_n in range(first, end, TILE):
            b_k_left, b_k_right, b_v_left, b_v_right = load_tile(
                p_k,
                p_v,
                p_row,
                (0, 0),
                i_n,
                end,
                i_kv,
                stride_block,
                stride_head,
                stride_slot,
                NUM_KV_HEADS,
                HEAD_DIM,
                PAGE,
                HALF,
                False,
                FP8,
                ON_GPU,
            )
            o_n = i_n + tl.arange(0, HALF)[None, :]
            visible = (o_n < end, o_n + HALF < end)
            b_m, b_l, b_acc = attend_tile(
                b_q, b_k_left, b_k_right, b_v_left, b_v_right, visible, qk_scale, b_m, b_l, b_acc, True
            )
        b_sum = tl.where(is_split, row_sums(b_l), 1.0)

        if seq_len <= SPLIT:
            b_out = finish(b_sum, b_acc, v_scale).to(p_out.dtype.element_ty)
            tl.store(p_out + o_q[:, None] + o_d[None, :], b_out, mask=(is_head & is_split)[:, None])
        else:
            first_partial = i_row * MAX_SPLITS if DIRECT else tl.load(p_first_partial + i_row)
            o_partial = (first_partial + i_split).to(tl.int64) * (NUM_KV_HEADS * GROUP) + b_head
            is_stored = is_head & is_split
            tl.store(p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :], b_acc, mask=is_stored[:, None])
            tl.store(p_partial_ml + o_partial * 2, b_m, mask=is_stored)
            tl.store(p_partial_ml + o_partial * 2 + 1, b_sum, mask=is_stored)


@triton.jit
def _reduce_splits(
    p_seq_len,
    p_first_partial,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_v_scale,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DIRECT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    i_row = tl.program_id(0)
    b_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, HEAD_DIM)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    num_splits = (tl.load(p_seq_len + i_row) + SPLIT - 1) // SPLIT
    if num_splits > 1:
        first = (i_row * MAX_SPLITS if DIRECT else tl.load(p_first_partial + i_row)).to(tl.int64)
        b_m = tl.full((HEADS,), float("-inf"), tl.float32)
        b_l = tl.zeros((HEADS,), tl.float32)
        b_acc = tl.zeros((HEADS, HEAD_DIM), tl.float32)
        for i_first in range(0, num_splits, UNROLL):
            for i_ahead in tl.static_range(UNROLL):
                # Splits past the last are empty states, which a merge leaves out to the bit.
                present = i_first + i_ahead < num_splits
                o_partial = (first + i_first + i_ahead) * NUM_Q_HEADS + b_head
                b_m_next = tl.load(p_partial_ml + o_partial * 2, mask=present, other=float("-inf"))
                b_l_next = tl.load(p_partial_ml + o_partial * 2 + 1, mask=present, other=0.0)
                p_acc_next = p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :]
                b_acc_next = tl.load(p_acc_next, mask=present, other=0.0)
                b_m, b_l, b_acc = merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next)
        b_v_scale = tl.full((HEADS,), 1.0, tl.float32)
        if HAS_SCALE:
            b_v_scale = tl.load(p_v_scale + b_head // GROUP)
        o_out = (i_row * NUM_Q_HEADS + b_head)[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_out + o_out, finish(b_l, b_acc, b_v_scale).to(p_out.dtype.element_ty))
