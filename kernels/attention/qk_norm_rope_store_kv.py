"""Work on a fused q/k/v projection before attention: bias, q/k-norm, RoPE, and storing K and V in
their KV slots.

RoPE rotates halves (x[i] with x[i + D/2]), or the pairs of `RotaryPairs`: then queries and keys
leave in the order of pairs, which changes no product of the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    EARLY_TOKENS,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from .paged_cache import as_pairs
from .rotary_pairs import RotaryPairs

HEADS = 4
"""Number of heads of a program; fixed, so that the layout of a reduction never depends on the
batch."""


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    pairs: RotaryPairs | None = None,
    has_gates: bool = False,
    dependent: bool = False,
) -> None:
    """Writes q_out [T, Hq, D] and the caches [num_blocks, Hk, block_size, D].

    qkv [T, (Hq + 2 Hk) D]; positions int [T]; slots int32 [T] = block id x block_size + offset,
    negative: K and V of this token are dropped (padding rows of a graph); cos_sin float32 [max
    positions, D], cosines in the first half. bias [(Hq + 2 Hk) D] or None. q_norm, k_norm [D], both
    or neither. k_scale, v_scale float32 [Hk] for fp8 caches: what is stored is value / scale, in
    the order that `paged_cache` reads. `pairs`: those that rotate; None: halves of a head.
    `has_gates`: in qkv [T, (2 Hq + 2 Hk) D], and in its bias, D numbers that are not read follow
    each query.
    """
    num_tokens, num_q_heads, head_dim = q_out.shape
    num_kv_heads = k_cache.shape[1]
    block_size = k_cache.shape[2]
    assert qkv.stride(1) == 1
    assert q_out.stride() == (num_q_heads * head_dim, head_dim, 1)
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == 1
    assert (q_norm is None) == (k_norm is None)
    q_groups = triton.cdiv(num_q_heads, HEADS)
    kv_groups = triton.cdiv(num_kv_heads, HEADS)
    unused = cos_sin
    k_cache = as_pairs(k_cache)
    v_cache = as_pairs(v_cache)
    _qk_norm_rope_store_kv[(num_tokens, q_groups + 2 * kv_groups)](
        qkv,
        positions,
        slots,
        cos_sin,
        k_cache,
        v_cache,
        q_out,
        unused if bias is None else bias,
        unused if q_norm is None else q_norm,
        unused if k_norm is None else k_norm,
        unused if k_scale is None else k_scale,
        unused if v_scale is None else v_scale,
        eps,
        qkv.stride(0),
        *k_cache.stride()[:3],
        NUM_Q_HEADS=num_q_heads,
        QUERY_HEADS=2 if has_gates else 1,
        NUM_KV_HEADS=num_kv_heads,
        PAGE=block_size,
        HALF=head_dim // 2,
        ROTATED=head_dim // 2 if pairs is None else pairs.width // 2,
        INTERLEAVED=pairs is not None and pairs.interleaved,
        HEADS=HEADS,
        HAS_BIAS=bias is not None,
        HAS_NORM=q_norm is not None,
        FP8=k_scale is not None,
        ON_GPU=qkv.is_cuda,
        DEPENDENT=dependent,
        EARLY=num_tokens <= EARLY_TOKENS,
        num_warps=1,
        **launch_options(dependent),
    )


def qk_norm_rope_twin(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    pairs: RotaryPairs | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, Hq, D], keys and values [T, Hk, D] in plain torch, in float32 or better; not
    rounded, not scaled. With `pairs`, queries and keys are in the order of pairs."""
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    if bias is not None:
        wide = wide + bias
    heads = wide.unflatten(-1, (num_q_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * q_norm
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm
    if pairs is not None:
        order = pairs.order(q.shape[-1]).to(q.device)
        q, k = q[..., order], k[..., order]
    cos, sin = cos_sin[positions].to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    return rotate(q), rotate(k), v


def store_kv_twin(values: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Stores values [T, Hk, D] in cache [num_blocks, Hk, block_size, D] at the slots that are not
    negative."""
    kept = slots >= 0
    where = slots[kept].long()
    cache[where // cache.shape[2], :, where % cache.shape[2]] = values[kept].to(cache.dtype)


@triton.jit
def _normalize(b_low, b_high, b_weight_low, b_weight_high, eps, HALF: tl.constexpr):
    b_square = tl.sum(b_low * b_low + b_high * b_high, axis=1)
    b_factor = tl.rsqrt(b_square / (2 * HALF) + eps)[:, None]
    return b_low * b_factor * b_weight_low[None, :], b_high * b_factor * b_weight_high[None, :]


@triton.jit
def _store(
    p,
    b_low,
    b_high,
    stored,
    p_scale,
    o_head,
    HALF: tl.constexpr,
    FP8: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Stores both halves of a head."""
    if FP8:
        b_scale = tl.load(p_scale + o_head, mask=stored, other=1.0)
        b_low = tl.clamp(b_low / b_scale, -448.0, 448.0)
        b_high = tl.clamp(b_high / b_scale, -448.0, 448.0)
        tl.store(p, _fp8_pairs(b_low, b_high, ON_GPU), mask=stored)
    else:
        tl.store(p, b_low.to(p.dtype.element_ty), mask=stored)
        tl.store(p + HALF, b_high.to(p.dtype.element_ty), mask=stored)


@triton.jit
def _fp8_pairs(b_low, b_high, ON_GPU: tl.constexpr):
    """The pairs as int16. NOTE: bytes put together by shifts lose every other lower one on the way
    through ptxas (12.8, sm_90)."""
    if ON_GPU:
        b_pairs = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 b, $4, $2;"
            " mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f",
            [b_low, b_high],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        b_low = b_low.to(tl.float8e4nv)
        b_high = b_high.to(tl.float8e4nv)
        b_low = b_low.to(tl.uint8, bitcast=True)
        b_high = b_high.to(tl.uint8, bitcast=True)
        b_pairs = b_low.to(tl.int16) | b_high.to(tl.int16) << 8
    return b_pairs


@triton.jit
def _qk_norm_rope_store_kv(
    p_qkv,
    p_position,
    p_slot,
    p_cos_sin,
    p_k_cache,
    p_v_cache,
    p_q_out,
    p_bias,
    p_q_norm,
    p_k_norm,
    p_k_scale,
    p_v_scale,
    eps,
    stride_qkv,
    stride_block,
    stride_head,
    stride_slot,
    NUM_Q_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8: tl.constexpr,
    ON_GPU: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    Q_GROUPS: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    i_token = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1)
    is_q = i_group < Q_GROUPS
    is_v = i_group >= Q_GROUPS + KV_GROUPS
    o_d = tl.arange(0, HALF)

    # A query takes the room of so many heads.
    KEYS_AT: tl.constexpr = NUM_Q_HEADS * QUERY_HEADS
    first = tl.where(is_q, 0, tl.where(is_v, KEYS_AT + NUM_KV_HEADS, KEYS_AT))
    own_group = tl.where(
        is_q, i_group, tl.where(is_v, i_group - Q_GROUPS - KV_GROUPS, i_group - Q_GROUPS)
    )
    o_head = own_group * HEADS + tl.arange(0, HEADS)
    inside = o_head < tl.where(is_q, NUM_Q_HEADS, NUM_KV_HEADS)
    o_in = (first + o_head * tl.where(is_q, QUERY_HEADS, 1))[:, None] * (2 * HALF)
    # Where the numbers of a pair stand in a head; those of values are halves of it.
    o_low = o_d
    o_high = o_d + HALF
    if ROTATED < HALF or INTERLEAVED:
        rotates = (o_d < ROTATED) & (not is_v)
        o_low = tl.where(is_v | rotates, o_d, o_d + ROTATED)
        o_high = tl.where(rotates, o_d + ROTATED, o_d + HALF)
        if INTERLEAVED:
            o_low = tl.where(rotates, 2 * o_d, o_low)
            o_high = tl.where(rotates, 2 * o_d + 1, o_high)

    if EARLY:
        # Attention copies keys of earlier steps meanwhile.
        release_dependents(DEPENDENT)
    # Positions, slots and weights are older than the product before this kernel.
    slot = tl.load(p_slot + i_token)
    p_angle = p_cos_sin + tl.load(p_position + i_token).to(tl.int64) * (2 * HALF) + o_d
    b_cos = tl.load(p_angle)[None, :]
    b_sin = tl.load(p_angle + HALF)[None, :]
    if HAS_NORM:
        p_norm = p_q_norm if is_q else p_k_norm
        b_norm_low = tl.load(p_norm + o_low).to(tl.float32)
        b_norm_high = tl.load(p_norm + o_high).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    p_heads = p_qkv + i_token * stride_qkv + o_in
    b_low = tl.load(p_heads + o_low[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    b_high = tl.load(p_heads + o_high[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if not EARLY:
        release_dependents(DEPENDENT)
    if HAS_BIAS:
        p_own_bias = p_bias + o_in
        b_bias = tl.load(p_own_bias + o_low[None, :], mask=inside[:, None], other=0.0)
        b_low += b_bias.to(tl.float32)
        b_bias = tl.load(p_own_bias + o_high[None, :], mask=inside[:, None], other=0.0)
        b_high += b_bias.to(tl.float32)

    o_cache = (slot // PAGE).to(tl.int64) * stride_block + (slot % PAGE) * stride_slot
    o_cache = o_cache + o_head[:, None] * stride_head + o_d[None, :]
    stored = inside[:, None] & (slot >= 0)
    if is_v:
        _store(
            p_v_cache + o_cache,
            b_low,
            b_high,
            stored,
            p_v_scale,
            o_head[:, None],
            HALF,
            FP8,
            ON_GPU,
        )
    else:
        if HAS_NORM:
            b_low, b_high = _normalize(b_low, b_high, b_norm_low, b_norm_high, eps, HALF)
        b_low, b_high = b_low * b_cos - b_high * b_sin, b_high * b_cos + b_low * b_sin
        if is_q:
            p_q = (
                p_q_out
                + i_token * (NUM_Q_HEADS * 2 * HALF)
                + o_head[:, None] * (2 * HALF)
                + o_d[None, :]
            )
            tl.store(p_q, b_low.to(p_q_out.dtype.element_ty), mask=inside[:, None])
            tl.store(p_q + HALF, b_high.to(p_q_out.dtype.element_ty), mask=inside[:, None])
        else:
            _store(
                p_k_cache + o_cache,
                b_low,
                b_high,
                stored,
                p_k_scale,
                o_head[:, None],
                HALF,
                FP8,
                ON_GPU,
            )
