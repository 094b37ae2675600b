"""Attention of one decoding row with all that lies between two products: q/k-norm, RoPE, the new key and value into
their slot, every split of the keys, and their merge, in one launch. Other bits than `decode_attention`.

How long a split is follows the length on the device, so one launch serves every length. Dependent, a program has its
first keys under way before it waits for the queries: those of earlier tokens, which an earlier step has written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headwater.kernels.decode_attention import decode_attention_twin
from headwater.kernels.dependent_launch import launch_options, release_dependents, wait_for_inputs
from headwater.kernels.online_softmax import LOG2_E
from headwater.kernels.paged_cache import is_paired
from headwater.kernels.qk_norm_rope_store_kv import qk_norm_rope_twin, store_kv_twin

TILE = 64
"""Keys that are read at once; splits are whole numbers of them."""
PROGRAMS = 128
"""About one for each multiprocessor."""
MOST_SPLITS = 32
NUM_WARPS = 4
ROWS = 16
"""Query heads of a kv head, padded for the matrix unit."""
AT_ONCE = 8
"""Splits that are merged at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWorkspace:
    """Of all layers, one after another."""

    arrived: torch.Tensor
    """int32 [Hk]: splits that are done; zero between launches."""
    partial_acc: torch.Tensor
    """float32 [splits, Hq, D]"""
    partial_ml: torch.Tensor
    """float32 [splits, Hq, 2]: maximum and sum."""

    @classmethod
    def allocate(
        cls,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_splits: int | None = None,
    ) -> RowWorkspace:
        """The number of splits is a power of two, by default as many as the device works on at once."""
        fitting = 1 << max(PROGRAMS // num_kv_heads, 1).bit_length() - 1
        splits = num_splits or min(fitting, MOST_SPLITS)
        return cls(
            arrived=torch.zeros(num_kv_heads, dtype=torch.int32, device=device),
            partial_acc=torch.zeros(splits, num_q_heads, head_dim, dtype=torch.float32, device=device),
            partial_ml=torch.zeros(splits, num_q_heads, 2, dtype=torch.float32, device=device),
        )


def row_attention(
    qkv: torch.Tensor,
    seq_len: torch.Tensor,
    table_row: torch.Tensor,
    block_tables: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    workspace: RowWorkspace,
    out: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Writes out [Hq D], and the caches [num_blocks, Hk, block_size, D] at the last position.

    qkv [(Hq + 2 Hk) D]; seq_len int32 [1], keys that the row reads, its own included, 0: nothing is read or written;
    table_row int32 [1] into block_tables int32 [rows, blocks]; cos_sin float32 [max positions, D], cosines first.
    q_norm, k_norm [D], both or neither. k_scale, v_scale float32 [Hk] for fp8 caches: what is stored is value / scale,
    in the order of `paged_cache`.
    With `dependent`, only qkv may be written by kernels that are themselves dependent; the rest is there before them.
    """
    num_splits, num_q_heads, head_dim = workspace.partial_acc.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    assert qkv.shape == ((num_q_heads + 2 * num_kv_heads) * head_dim,)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert (q_norm is None) == (k_norm is None)
    assert (k_scale is not None) == (v_scale is not None) == is_paired(k_cache)
    assert num_q_heads // num_kv_heads <= ROWS
    unused = cos_sin
    _row_attention[(num_splits, num_kv_heads)](
        qkv,
        seq_len,
        table_row,
        block_tables,
        cos_sin,
        k_cache,
        v_cache,
        workspace.arrived,
        workspace.partial_acc,
        workspace.partial_ml,
        out,
        unused if q_norm is None else q_norm,
        unused if k_norm is None else k_norm,
        unused if k_scale is None else k_scale,
        unused if v_scale is None else v_scale,
        eps,
        LOG2_E / math.sqrt(head_dim),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        ROWS=ROWS,
        TILE=TILE,
        SPLITS=num_splits,
        AT_ONCE=AT_ONCE,
        HAS_NORM=q_norm is not None,
        FP8=is_paired(k_cache),
        DEPENDENT=dependent,
        num_warps=NUM_WARPS,
        **launch_options(dependent),
    )


def row_attention_twin(
    qkv: torch.Tensor,
    seq_len: int,
    table_row: int,
    block_tables: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """[Hq D] in plain torch, in qkv's precision or float32; writes the caches, which hold plain values."""
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    last = torch.tensor([seq_len - 1], device=qkv.device)
    q, k, v = qk_norm_rope_twin(
        qkv[None], last, cos_sin, num_q_heads, num_kv_heads, q_norm=q_norm, k_norm=k_norm, eps=eps
    )
    slots = block_tables[table_row, last // block_size] * block_size + last % block_size
    store_kv_twin(k, slots, k_cache)
    store_kv_twin(v, slots, v_cache)
    lengths, rows = last.int() + 1, torch.tensor([table_row], dtype=torch.int32, device=qkv.device)
    return decode_attention_twin(q, k_cache, v_cache, lengths, rows, block_tables)[0].flatten()


@triton.jit
def _angles(p_angle, o_d, HEAD_DIM: tl.constexpr):
    """Cosines [ROWS, D], and sines with the sign that the other half has."""
    HALF: tl.constexpr = HEAD_DIM // 2
    b_sin = tl.load(p_angle + HALF + o_d % HALF)
    return tl.load(p_angle + o_d % HALF), tl.where(o_d < HALF, -b_sin, b_sin)


@triton.jit
def _dimensions(o_m, HEAD_DIM: tl.constexpr, FP8: tl.constexpr):
    """Which lie where in a cache, see `paged_cache`: heads are computed in that order."""
    return o_m // 2 + o_m % 2 * (HEAD_DIM // 2) if FP8 else o_m


@triton.jit
def _with_other_half(p_x, o_d, HEAD_DIM: tl.constexpr):
    return tl.load(p_x + o_d), tl.load(p_x + (o_d + HEAD_DIM // 2) % HEAD_DIM)


@triton.jit
def _rotated(p_x, norm, angles, o_d, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads after norm and RoPE, which turns each half with the other: [ROWS, D]."""
    b_x, b_other = _with_other_half(p_x, o_d, HEAD_DIM)
    b_x, b_other = b_x.to(tl.float32), b_other.to(tl.float32)
    if HAS_NORM:
        b_factor = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / HEAD_DIM + eps)[:, None]
        b_x *= b_factor * norm[0].to(tl.float32)
        b_other *= b_factor * norm[1].to(tl.float32)
    return b_x * angles[0] + b_other * angles[1]


@triton.jit
def _in_units(b_x, p_scale, i_kv, dtype: tl.constexpr, FP8: tl.constexpr):
    if FP8:
        b_x = tl.clamp(b_x / tl.load(p_scale + i_kv), -448.0, 448.0)
    return b_x.to(dtype)


@triton.jit
def _tile(caches, p_table, start, last, where, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Keys and values [TILE, D] from position `start` on, those before `last`; others are zero."""
    i_kv, stride_block, stride_head, stride_slot = where
    o_n = start + tl.arange(0, TILE)
    is_old = o_n < last
    if PAGE % TILE == 0:
        b_block = tl.load(p_table + start // PAGE, mask=start < last, other=0).to(tl.int64)
    else:
        b_block = tl.load(p_table + o_n // PAGE, mask=is_old, other=0).to(tl.int64)
    o_slot = b_block * stride_block + i_kv * stride_head + o_n % PAGE * stride_slot
    o_tile = o_slot[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    b_k = tl.load(caches[0] + o_tile, mask=is_old[:, None], other=0.0)
    return b_k, tl.load(caches[1] + o_tile, mask=is_old[:, None], other=0.0)


@triton.jit
def _row_attention(
    p_qkv,
    p_seq_len,
    p_table_row,
    p_table,
    p_cos_sin,
    p_k_cache,
    p_v_cache,
    p_arrived,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_q_norm,
    p_k_norm,
    p_k_scale,
    p_v_scale,
    eps,
    qk_scale,
    stride_table,
    stride_block,
    stride_head,
    stride_slot,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    release_dependents(DEPENDENT)
    i_split, i_kv, seq_len = tl.program_id(0), tl.program_id(1), tl.load(p_seq_len)
    split_len = tl.cdiv(tl.cdiv(seq_len, TILE), SPLITS) * TILE
    first = i_split * split_len
    if first < seq_len:
        p_table += tl.load(p_table_row).to(tl.int64) * stride_table
        caches, where = (p_k_cache, p_v_cache), (i_kv, stride_block, stride_head, stride_slot)
        last, end = seq_len - 1, tl.minimum(first + split_len, seq_len)
        end_old, is_newest = tl.minimum(last, end), end == seq_len
        b_k, b_v = _tile(caches, p_table, first, end_old, where, HEAD_DIM, PAGE, TILE)
        o_r = tl.arange(0, ROWS)
        is_head, o_head = o_r < GROUP, i_kv * GROUP + o_r
        # What all rows have in common each loads for itself, so that nothing has to cross threads.
        o_m = o_r[:, None] * 0 + tl.arange(0, HEAD_DIM)[None, :]
        o_d = _dimensions(o_m, HEAD_DIM, FP8)
        # They come from memory, what the kernel waits for from the cache.
        q_norm, k_norm = _with_other_half(p_q_norm, o_d, HEAD_DIM), _with_other_half(p_k_norm, o_d, HEAD_DIM)
        angles = _angles(p_cos_sin + last.to(tl.int64) * HEAD_DIM, o_d, HEAD_DIM)
        block = tl.load(p_table + last // PAGE).to(tl.int64)
        o_newest = block * stride_block + i_kv * stride_head + last % PAGE * stride_slot + o_m

        wait_for_inputs(DEPENDENT)
        # Rows past the last head compute another's; those of the new key and value are all the same.
        p_q = p_qkv + tl.where(is_head, o_head, 0)[:, None] * HEAD_DIM
        p_k = p_qkv + (NUM_Q_HEADS + i_kv) * HEAD_DIM
        b_q = _rotated(p_q, q_norm, angles, o_d, eps, HEAD_DIM, HAS_NORM)
        b_q *= qk_scale * tl.load(p_k_scale + i_kv) if FP8 else qk_scale
        b_k_new = _rotated(p_k, k_norm, angles, o_d, eps, HEAD_DIM, HAS_NORM)
        b_k_new = _in_units(b_k_new, p_k_scale, i_kv, p_k_cache.dtype.element_ty, FP8)
        b_v_new = tl.load(p_k + NUM_KV_HEADS * HEAD_DIM + o_d).to(tl.float32)
        b_v_new = _in_units(b_v_new, p_v_scale, i_kv, p_v_cache.dtype.element_ty, FP8)
        tl.store(p_k_cache + o_newest, b_k_new, mask=((o_r == 0) & is_newest)[:, None])
        tl.store(p_v_cache + o_newest, b_v_new, mask=((o_r == 0) & is_newest)[:, None])

        # The newest key is the first of its split.
        b_m = tl.where(is_newest, tl.sum(b_q * b_k_new.to(tl.float32), axis=1), float("-inf"))
        b_l = tl.where(is_newest, tl.full((ROWS,), 1.0, tl.float32), 0.0)
        b_acc = tl.where(is_newest, b_v_new.to(tl.float32), 0.0)
        b_q = b_q.to(p_qkv.dtype.element_ty)
        for start in range(first, end, TILE):
            b_k_next, b_v_next = _tile(caches, p_table, start + TILE, end_old, where, HEAD_DIM, PAGE, TILE)
            b_m, b_l, b_acc = _attend_tile(b_q, b_k.to(b_q.dtype), b_v.to(b_q.dtype), end_old - start, b_m, b_l, b_acc)
            b_k, b_v = b_k_next, b_v_next

        num_splits = tl.cdiv(seq_len, split_len)
        v_scale = tl.load(p_v_scale + i_kv) if FP8 else 1.0
        if num_splits == 1:
            b_out = (b_acc * (v_scale / b_l)[:, None]).to(p_out.dtype.element_ty)
            tl.store(p_out + o_head[:, None] * HEAD_DIM + o_d, b_out, mask=is_head[:, None])
        else:
            partials = p_partial_acc, p_partial_ml
            _store_partial(partials, i_split * NUM_Q_HEADS + o_head, is_head, b_m, b_l, b_acc)
            tl.debug_barrier()
            if tl.atomic_add(p_arrived + i_kv, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(p_arrived + i_kv, 0)
                _merge(partials, p_out, num_splits, i_kv * GROUP, v_scale, NUM_Q_HEADS, GROUP, HEAD_DIM, AT_ONCE, FP8)
    # Programs without work too: this kernel has ended only when those before it have.
    wait_for_inputs(DEPENDENT)


@triton.jit
def _attend_tile(b_q, b_k, b_v, num_old, b_m, b_l, b_acc):
    """Maxima and sums [ROWS], values [ROWS, D], base 2, after the first keys of a tile."""
    is_old = tl.arange(0, b_k.shape[0])[None, :] < num_old
    b_score = tl.where(is_old, tl.dot(b_q, tl.trans(b_k)), float("-inf"))
    b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1))
    b_alpha, b_p = tl.exp2(b_m - b_m_new), tl.exp2(b_score - b_m_new[:, None])
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
    return b_m_new, b_l * b_alpha + tl.sum(b_p, axis=1), b_acc


@triton.jit
def _store_partial(partials, o_partial, is_head, b_m, b_l, b_acc):
    o_d = tl.arange(0, b_acc.shape[1])[None, :]
    tl.store(partials[0] + o_partial[:, None] * b_acc.shape[1] + o_d, b_acc, mask=is_head[:, None])
    tl.store(partials[1] + o_partial * 2, b_m, mask=is_head)
    tl.store(partials[1] + o_partial * 2 + 1, b_l, mask=is_head)


@triton.jit
def _merge(
    partials,
    p_out,
    num_splits,
    first_head,
    v_scale,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FP8: tl.constexpr,
):
    """The heads of all splits, first to last, whoever came last."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    o_h, o_d = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)
    is_head = o_h < GROUP
    b_m = tl.full((HEADS,), float("-inf"), tl.float32)
    b_l = tl.zeros((HEADS,), tl.float32)
    b_acc = tl.zeros((HEADS, HEAD_DIM), tl.float32)
    for i_first in range(0, num_splits, AT_ONCE):
        o_s = i_first + tl.arange(0, AT_ONCE)
        is_there = (o_s < num_splits)[:, None] & is_head[None, :]
        o_partial = o_s[:, None] * NUM_Q_HEADS + first_head + o_h[None, :]
        b_ms = tl.load(partials[1] + o_partial * 2, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        b_ls = tl.load(partials[1] + o_partial * 2 + 1, mask=is_there, other=0.0, cache_modifier=".cg")
        p_acc = partials[0] + o_partial[:, :, None] * HEAD_DIM + o_d[None, None, :]
        b_accs = tl.load(p_acc, mask=is_there[:, :, None], other=0.0, cache_modifier=".cg")
        b_m_new = tl.maximum(b_m, tl.max(b_ms, axis=0))
        # Heads that pad the tile have no maximum.
        b_shift = tl.where(is_head, b_m_new, 0.0)
        b_alpha, b_weights = tl.exp2(b_m - b_shift), tl.exp2(b_ms - b_shift[None, :])
        b_l = b_l * b_alpha + tl.sum(b_weights * b_ls, axis=0)
        b_acc = b_acc * b_alpha[:, None] + tl.sum(b_weights[:, :, None] * b_accs, axis=0)
        b_m = b_m_new
    b_out = b_acc * (v_scale / tl.where(is_head, b_l, 1.0))[:, None]
    p_head = p_out + (first_head + o_h)[:, None] * HEAD_DIM + _dimensions(o_d, HEAD_DIM, FP8)[None, :]
    tl.store(p_head, b_out.to(p_out.dtype.element_ty), mask=is_head[:, None])
