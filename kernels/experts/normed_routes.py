"""The experts of one token from its residual stream, in one launch on Hopper: the sum and the norm
of `add_rms_norm`, the router's product of `few_rows_gemm` and the choice of `route`, with their
bits.

Each program norms the token by itself while weights of the router come into shared memory. The last
program that has made logits chooses the experts, and stores the sum when all have read its terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..attention import hopper_attention
from ..gemm.hopper_few_rows_gemm import (
    BLOCK_K,
    BLOCK_M,
    ROW_SIZE,
    SHARED_BYTES,
    multiply_tiles,
    tiles_at_once,
)
from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, tiled, wait_for_inputs
from ..norm.rms_norm import norm_warps
from . import route
from .route import Choice

LEAST = gl.constexpr(route.LEAST.value)
SIGN = gl.constexpr(route.SIGN.value)
BLOCK_N = 16
"""Logits of a program."""
WARPS = (4, 8)
"""Numbers of warps whose norm is computed here."""


@dataclass(frozen=True, slots=True, eq=False)
class NormedRouter:
    """Factors of a norm and the router that reads its result."""

    norm: torch.Tensor
    """[H], the factors of the norm, of the model's dtype or float32."""
    eps: float
    weight: torch.Tensor
    """[E, H]"""
    choice: Choice
    correction: torch.Tensor | None
    """float32 [E]"""
    bias: torch.Tensor | None
    """[E], added to logits in float32."""
    counts: torch.Tensor | None
    """int64 [E], to which rows of experts are added."""
    num_done: torch.Tensor
    """int32 [1], zero before and behind: number of programs that are done."""

    @property
    def is_served(self) -> bool:
        """Whether tokens are normed and routed here."""
        num_experts, hidden = self.weight.shape
        num_tiles = hidden // BLOCK_K.value
        rows = (triton.next_power_of_2(num_tiles) - 1) * ROW_SIZE.value + BLOCK_M.value
        num_bytes = 2 * BLOCK_K.value * (rows + num_tiles * BLOCK_N)
        return (
            self.weight.dtype == torch.bfloat16
            and self.norm.dtype in (torch.bfloat16, torch.float32)
            and self.weight.is_contiguous()
            and hidden % BLOCK_K.value == 0
            and tiles_at_once(hidden) > 0
            and norm_warps(hidden) in WARPS
            and num_bytes <= SHARED_BYTES
            and num_experts >= 32
            and num_experts == triton.next_power_of_2(num_experts)
            and self.choice.num_groups == 1
            and hopper_attention.is_hopper(self.weight.device)
        )


def normed_routes(
    x: torch.Tensor, residual: torch.Tensor, router: NormedRouter, *, dependent: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds x [1, H] to residual [1, H] in place; returns the norm of the sum [1, H], and the
    token's experts int32 [1, k] and weights float32 [1, k]."""
    num_experts, hidden = router.weight.shape
    assert router.is_served
    assert x.shape == residual.shape == (1, hidden)
    assert x.stride(1) == residual.stride(1) == 1
    choice = router.choice
    out = torch.empty_like(x)
    logits = x.new_empty(num_experts)
    experts = torch.empty(1, choice.num_chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty_like(experts, dtype=torch.float32)
    _normed_routes[(num_experts // BLOCK_N,)](
        tiled(router.weight, [BLOCK_N, BLOCK_K.value]),
        x,
        residual,
        router.norm,
        out,
        logits,
        router.num_done,
        router.correction,
        router.bias,
        experts,
        weights,
        router.counts,
        hidden,
        router.eps,
        choice.scale,
        K=hidden,
        AT_ONCE=tiles_at_once(hidden),
        NUM_EXPERTS=num_experts,
        CHOSEN=choice.num_chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(choice.num_chosen),
        FIRST_OWN=-1 if choice.own is None else choice.own.start,
        NUM_OWN=0 if choice.own is None else len(choice.own),
        SIGMOID=choice.is_sigmoid,
        NORMALIZED=choice.is_normalized,
        WARPS=norm_warps(hidden),
        DEPENDENT=dependent,
        num_warps=norm_warps(hidden),
        **dependent_launch.launch_options(dependent),
    )
    return out, experts, weights


@gluon.jit
def _normed_routes(
    weight,
    p_x,
    p_residual,
    p_norm,
    p_out,
    p_logits,
    p_num_done,
    p_correction,
    p_bias,
    p_experts,
    p_weights,
    p_counts,
    hidden,
    eps,
    scale,
    K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    CHOSEN: gl.constexpr,
    CHOSEN_BLOCK: gl.constexpr,
    FIRST_OWN: gl.constexpr,
    NUM_OWN: gl.constexpr,
    SIGMOID: gl.constexpr,
    NORMALIZED: gl.constexpr,
    WARPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    choice: gl.constexpr = (
        NUM_EXPERTS, CHOSEN, CHOSEN_BLOCK, FIRST_OWN, NUM_OWN, SIGMOID, NORMALIZED
    )  # fmt: skip
    NUM_TILES: gl.constexpr = K // BLOCK_K
    X_TILES: gl.constexpr = triton.next_power_of_2(NUM_TILES)
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROW_SIZE, BLOCK_K], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [X_TILES + BLOCK_M // ROW_SIZE - 1, ROW_SIZE, BLOCK_K], slab
    )
    w_tiles = gl.allocate_shared_memory(weight.dtype, [NUM_TILES, BLOCK_N, BLOCK_K], weight.layout)
    ready = gl.allocate_shared_memory(
        gl.int64, [NUM_TILES // AT_ONCE, 1], hopper.mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(NUM_TILES // AT_ONCE):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    release_dependents(DEPENDENT)
    o_n = gl.program_id(0) * BLOCK_N
    for i in range(NUM_TILES):
        is_ready = ready.index(i // AT_ONCE)
        if i % AT_ONCE == 0:
            hopper.mbarrier.expect(is_ready, AT_ONCE * weight.block_type.nbytes)
        hopper.tma.async_copy_global_to_shared(
            weight, [o_n, i * BLOCK_K], is_ready, w_tiles.index(i)
        )
    # A thread has the numbers that it has in `rms_norm`, which adds them in that order.
    row: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    o_h = gl.arange(0, X_TILES * BLOCK_K, layout=row)
    inside = o_h < K
    b_norm = gl.load(p_norm + o_h, mask=inside, other=0.0).to(gl.float32)
    wait_for_inputs(DEPENDENT)
    b_x = gl.load(p_x + o_h, mask=inside, other=0.0).to(gl.float32)
    b_x += gl.load(p_residual + o_h, mask=inside, other=0.0).to(gl.float32)
    b_sum = b_x.to(gl.bfloat16)
    b_x = b_sum.to(gl.float32)
    variance = gl.sum(b_x * b_x, axis=0) / hidden
    b_y = (b_x * gl.rsqrt(variance + eps) * b_norm).to(gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tiles = x_tiles.index(0)._reinterpret(gl.bfloat16, [X_TILES, ROW_SIZE * BLOCK_K], flat)
    tiles.slice(0, BLOCK_K, dim=1).store(gl.reshape(b_y, [X_TILES, BLOCK_K]))
    hopper.fence_async_shared()
    gl.thread_barrier()
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, BLOCK_N * 4 // WARPS, 16]
    )
    b_acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, mma)
    b_acc = multiply_tiles(x_tiles, w_tiles, ready, b_acc, AT_ONCE)
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma))[:, None]
    o_logit = o_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, mma))[None, :]
    p_own = p_logits + o_row * 0 + o_logit
    gl.store(p_own, b_acc.to(gl.bfloat16), mask=(o_row < 1) & (o_logit >= 0))
    if o_n == 0:
        gl.store(p_out + o_h, b_y, mask=inside)
    gl.thread_barrier()
    if gl.atomic_add(p_num_done, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(p_num_done, 0)
        gl.store(p_residual + o_h, b_sum, mask=inside)
        given = (p_correction, p_bias, p_experts, p_weights, p_counts)
        _choose(p_logits, given, scale, choice, WARPS)


@gluon.jit
def _choose(p_logits, given, scale, choice: gl.constexpr, WARPS: gl.constexpr):
    """As `route` chooses, by each warp alone: all have the same numbers."""
    p_correction, p_bias, p_experts, p_weights, p_counts = given
    NUM_EXPERTS: gl.constexpr = choice[0]
    CHOSEN: gl.constexpr = choice[1]
    PART: gl.constexpr = min(8, NUM_EXPERTS // 32)
    o_expert = gl.arange(0, NUM_EXPERTS, layout=gl.BlockedLayout([PART], [32], [WARPS], [0]))
    b_logit = gl.load(p_logits + o_expert).to(gl.float32)
    if p_bias is not None:
        b_logit += gl.load(p_bias + o_expert).to(gl.float32)
    b_score = _scores(b_logit, choice[5])
    b_left = b_score
    if p_correction is not None:
        b_left += gl.load(p_correction + o_expert)
    b_bits = b_score.to(gl.int32, bitcast=True)
    b_key = b_left.to(gl.int32, bitcast=True)
    b_key ^= (b_key >> 31) & SIGN
    o_chosen = gl.arange(0, choice[2], layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    b_experts = o_chosen * 0
    b_weights = b_experts.to(gl.float32)
    total = 0.0
    for i in gl.static_range(CHOSEN):
        best = gl.max(b_key, 0)
        expert = gl.min(gl.where(b_key == best, o_expert, NUM_EXPERTS - 1), 0)
        is_chosen = o_expert == expert
        bits = gl.sum(gl.where(is_chosen, b_bits, 0), 0)
        weight = bits.to(gl.float32, bitcast=True)
        total += weight
        b_experts = gl.where(o_chosen == i, expert, b_experts)
        b_weights = gl.where(o_chosen == i, weight, b_weights)
        b_key = gl.where(is_chosen, LEAST, b_key)
    if choice[6]:
        b_weights = b_weights / gl.where(total == 0.0, 1.0, total)
    is_choice = o_chosen < CHOSEN
    if p_counts is not None:
        b_one = (o_chosen * 0 + 1).to(gl.int64)
        gl.atomic_add(p_counts + b_experts, b_one, mask=is_choice, sem="relaxed")
    if choice[3] >= 0:
        b_own = b_experts - choice[3]
        b_experts = gl.where((b_own >= 0) & (b_own < choice[4]), b_own, -1)
    gl.store(p_experts + o_chosen, b_experts, mask=is_choice)
    gl.store(p_weights + o_chosen, b_weights * scale, mask=is_choice)


@gluon.jit
def _scores(b_logit, SIGMOID: gl.constexpr):
    if SIGMOID:
        b_score = 1.0 / (1.0 + gl.exp(-b_logit))
    else:
        best = gl.max(b_logit, 0)
        b_score = gl.exp(b_logit - gl.where(best == -float("inf"), 0.0, best))
        b_score = b_score / gl.sum(b_score, 0)
    return b_score
