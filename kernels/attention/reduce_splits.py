"""Merges the partial results of `decode_attention` and `shared_prefix_attention`, first to last."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import (
    EARLY_TOKENS,
    launch_options,
    release_dependents,
    wait_for_inputs,
)
from .decode_plan import FEW_ROWS
from .online_softmax import SPLIT, finish, first_keys, merge_states, with_sinks

MAX_DIMS = 256
"""Most values of a head that one program merges: its registers hold several splits of this size. A
program merges PART_DIMS values of larger heads."""
PART_DIMS = 128


class SplitPlan(Protocol):
    """Partial results of a plan's splits, as `DecodePlan` describes them."""

    @property
    def max_splits(self) -> int: ...

    @property
    def is_direct(self) -> bool: ...

    @property
    def counts(self) -> torch.Tensor: ...

    @property
    def first_partials(self) -> torch.Tensor: ...

    @property
    def folded(self) -> torch.Tensor | None: ...

    @property
    def partial_acc(self) -> torch.Tensor: ...

    @property
    def partial_ml(self) -> torch.Tensor: ...


def reduce_splits(
    seq_lens: torch.Tensor,
    plan: SplitPlan,
    out: torch.Tensor,
    *,
    v_scale: torch.Tensor | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    dependent: bool = False,
    early: bool = False,
) -> None:
    """Merges the partial results of rows with more than one split into out [R, Hq, D]; results of
    splits before a window of `window` keys were not computed; sinks as in `decode_attention`.
    `early`: the product that reads it
    fills rings with weights."""
    num_rows, num_q_heads, head_dim = out.shape
    heads = 8 if num_rows * num_q_heads >= 4096 and num_q_heads % 8 == 0 else 1
    block_d = triton.next_power_of_2(head_dim) if head_dim <= MAX_DIMS else PART_DIMS
    _reduce_splits[(num_rows, num_q_heads // heads, triton.cdiv(head_dim, block_d))](
        seq_lens,
        plan.counts,
        plan.first_partials,
        plan.folded,
        plan.partial_acc,
        plan.partial_ml,
        out,
        seq_lens if v_scale is None else v_scale,
        sinks,
        NUM_Q_HEADS=num_q_heads,
        GROUP=1 if v_scale is None else num_q_heads // len(v_scale),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEADS=heads,
        SPLIT=SPLIT,
        UNROLL=4 if heads > 1 else 16,
        MAX_SPLITS=plan.max_splits,
        WINDOW=window,
        DIRECT=plan.is_direct,
        HAS_SCALE=v_scale is not None,
        DEPENDENT=dependent,
        EARLY=(v_scale is None and num_rows in FEW_ROWS) or (early and num_rows <= EARLY_TOKENS),
        num_warps=4 if heads > 1 else 1,
        **launch_options(dependent),
    )


@triton.jit
def _reduce_splits(
    p_seq_len,
    p_count,
    p_first_partial,
    p_folded,
    p_partial_acc,
    p_partial_ml,
    p_out,
    p_v_scale,
    p_sinks,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    i_row = tl.program_id(0)
    b_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = (o_d < HEAD_DIM)[None, :]
    seq_len = tl.load(p_seq_len + i_row)
    num_splits = (seq_len + SPLIT - 1) // SPLIT
    oldest_split = first_keys(0, seq_len, WINDOW, SPLIT)[0] // SPLIT
    first = (i_row * MAX_SPLITS if DIRECT else tl.load(p_first_partial + i_row)).to(tl.int64)
    num_folded = 1 if p_folded is None else tl.load(p_folded + i_row)
    if EARLY:
        # The product that follows has its weights in shared memory when the last programs of
        # attention end.
        release_dependents(DEPENDENT)
    wait_for_inputs(DEPENDENT)
    if not EARLY:
        release_dependents(DEPENDENT)
    if i_row + tl.program_id(1) + tl.program_id(2) == 0:
        # Resets the counter from which programs of the next layer draw their items.
        tl.store(p_count + 3, 0)
    if num_splits > num_folded:
        b_m = tl.full((HEADS,), float("-inf"), tl.float32)
        b_l = tl.zeros((HEADS,), tl.float32)
        b_acc = tl.zeros((HEADS, BLOCK_D), tl.float32)
        if p_folded is not None:
            # The merge goes on from the state of the folded splits.
            o_partial = first * NUM_Q_HEADS + b_head
            b_m = tl.load(p_partial_ml + o_partial * 2)
            b_l = tl.load(p_partial_ml + o_partial * 2 + 1)
            p_acc = p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :]
            b_acc = tl.load(p_acc, mask=is_d, other=0.0)
            oldest_split = num_folded
        for i_first in range(oldest_split, num_splits, UNROLL):
            for i_ahead in tl.static_range(UNROLL):
                # Splits past the last are empty states, which a merge leaves out to the bit.
                present = i_first + i_ahead < num_splits
                o_partial = (first + i_first + i_ahead) * NUM_Q_HEADS + b_head
                b_m_next = tl.load(p_partial_ml + o_partial * 2, mask=present, other=float("-inf"))
                b_l_next = tl.load(p_partial_ml + o_partial * 2 + 1, mask=present, other=0.0)
                p_acc_next = p_partial_acc + o_partial[:, None] * HEAD_DIM + o_d[None, :]
                b_acc_next = tl.load(p_acc_next, mask=present & is_d, other=0.0)
                b_m, b_l, b_acc = merge_states(b_m, b_l, b_acc, b_m_next, b_l_next, b_acc_next)
        b_l = with_sinks(b_m, b_l, p_sinks, b_head, b_head >= 0)
        b_v_scale = tl.full((HEADS,), 1.0, tl.float32)
        if HAS_SCALE:
            b_v_scale = tl.load(p_v_scale + b_head // GROUP)
        o_out = (i_row * NUM_Q_HEADS + b_head)[:, None] * HEAD_DIM + o_d[None, :]
        b_out = finish(b_l, b_acc, b_v_scale).to(p_out.dtype.element_ty)
        tl.store(p_out + o_out, b_out, mask=is_d)
