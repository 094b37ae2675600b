"""Products of rows with the weights of their experts, for few rows an expert: memory's time is that
of the weights of each chosen expert, once.

A program multiplies all rows of one expert with some of its outputs. Of few pairs it finds those
rows itself; of more a work list names them. K is never split and rows never meet, so that a row's
bits are those of `gemm`, whichever kernel, tile or program computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch.dependent_launch import ask_early, launch_options, release_dependents, wait_for_inputs
from ..norm.silu_mul import gated, gelu_gated
from .work_list import WorkList

PAIRS = (32, 256)
"""Most pairs that programs look at without a work list, by kernel."""
LINE_BYTES = 128
"""Size of a line of the second-level cache."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    block_m: int
    block_n: int
    """Number of outputs in a tile; with gates, of outputs that are gated."""
    block_k: int
    num_warps: int
    num_stages: int
    wide: bool = False
    """Whether the matrix unit gets the weights as the operand with the many rows."""


def gated_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    tiles: RowTiles,
    work: WorkList | None = None,
    *,
    is_gelu: bool = False,
    dependent: bool = False,
) -> None:
    """Writes `silu_mul`, or `gelu_tanh_mul`, of x [T, H] times the weights [E, 2 I, H] of experts
    int32 [T, k] to out [T k, I], a row a pair."""
    assert weight.shape[1] == 2 * out.shape[1]
    _launch(
        x,
        weight,
        experts,
        out,
        tiles,
        work,
        gates=True,
        is_gelu=is_gelu,
        dependent=dependent,
    )


def plain_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    tiles: RowTiles,
    work: WorkList | None = None,
    *,
    knows_experts: bool = True,
    dependent: bool = False,
) -> None:
    """Writes x [rows, I], a row for equally many pairs, times the weights [E, H, I] of their
    experts to out [T k, H]. With `dependent`, the previous kernel may still be writing x. If it
    does not write the experts, `knows_experts`, weights of few pairs are prefetched meanwhile."""
    assert weight.shape[1] == out.shape[1]
    _launch(
        x,
        weight,
        experts,
        out,
        tiles,
        work,
        gates=False,
        dependent=dependent,
        asks=knows_experts,
    )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    tiles: RowTiles,
    work: WorkList | None,
    *,
    gates: bool,
    is_gelu: bool = False,
    dependent: bool,
    asks: bool = False,
) -> None:
    num_experts, _, k = weight.shape
    num_pairs, n = out.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert work is None or work.block_m == tiles.block_m
    num_slots = min(num_pairs, num_experts) if work is None else work.max_tiles
    num_parts = triton.cdiv(n, tiles.block_n)
    asks = asks and dependent and work is None and num_pairs <= PAIRS[0]
    _expert_rows[(num_slots, num_parts)](
        x,
        weight,
        TensorDescriptor.from_tensor(weight.view(-1, k), [tiles.block_n, tiles.block_k]),
        out,
        experts,
        None if work is None else work.pairs,
        None if work is None else work.tiles,
        None if work is None else work.num_tiles,
        num_pairs,
        num_slots,
        n,
        k,
        x.stride(0),
        PAIRS=0 if work is not None else next(size for size in PAIRS if num_pairs <= size),
        BY_PAIR=work is None and num_pairs <= num_experts,
        SHARED_BY=num_pairs // len(x),
        EVEN_K=k % tiles.block_k == 0,
        LINES=triton.cdiv(k * weight.itemsize, LINE_BYTES) if asks else 0,
        LINES_BLOCK=triton.next_power_of_2(triton.cdiv(k * weight.itemsize, LINE_BYTES)),
        **constants(tiles, gates=gates, is_gelu=is_gelu, dependent=dependent),
        num_warps=tiles.num_warps,
        **launch_options(dependent),
    )


def constants(
    tiles: RowTiles, *, gates: bool, is_gelu: bool, dependent: bool
) -> dict[str, int | bool]:
    """Constants that the kernel is compiled for, besides those of a shape."""
    return {
        "GATES": gates,
        "GELU": is_gelu,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "WIDE": tiles.wide,
        "STAGES": tiles.num_stages,
        "DEPENDENT": dependent,
    }


@triton.jit
def _find_rows(p_experts, num_pairs, i_slot, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr):
    """The expert of a slot, the rank of each pair [PAIRS] among its pairs, and their number. With
    BY_PAIR a slot is a pair and has the rows of its expert if none before it has; otherwise it is
    an expert. Pairs of expert −1 are no slot's."""
    o_pair = tl.arange(0, PAIRS)
    b_expert = tl.load(p_experts + o_pair, mask=o_pair < num_pairs, other=-1)
    expert = tl.load(p_experts + i_slot) if BY_PAIR else i_slot
    is_mine = b_expert == expert
    b_rank = tl.where(is_mine, tl.cumsum(is_mine.to(tl.int32), 0) - 1, -1)
    count = tl.sum(is_mine.to(tl.int32), 0)
    if BY_PAIR:
        first = tl.min(tl.where(is_mine, o_pair, PAIRS), 0)
        count = tl.where((first == i_slot) & (expert >= 0), count, 0)
    return expert, b_rank, count


@triton.jit
def _ask_for_weights(
    p_weight,
    first_n,
    k,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    LINES_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Prefetches BLOCK_N rows of weights; lines past the last one of a row are that one again."""
    LINE: tl.constexpr = 1024 // p_weight.dtype.element_ty.primitive_bitwidth
    o_row = first_n + tl.arange(0, BLOCK_N)[:, None]
    o_line = tl.minimum(tl.arange(0, LINES_BLOCK), LINES - 1)[None, :]
    ask_early(p_weight + o_row.to(tl.int64) * k + o_line * LINE, DEPENDENT)


@triton.jit
def _dot(b_x, b_w, b_acc, WIDE: tl.constexpr):
    if WIDE:
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _multiply(
    p_x,
    is_row,
    weight,
    o_n,
    o_up,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATES: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products of rows p_x [M, 1] with BLOCK_N weights from o_n and, with GATES, from o_up:
    [N, M] when WIDE and [M, N] otherwise."""
    o_k = tl.arange(0, BLOCK_K)[None, :]
    b_acc = tl.zeros((BLOCK_N, BLOCK_M) if WIDE else (BLOCK_M, BLOCK_N), tl.float32)
    b_up = b_acc
    for i_k in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            b_x = tl.load(p_x + i_k + o_k, mask=is_row[:, None], other=0.0)
        else:
            b_x = tl.load(p_x + i_k + o_k, mask=is_row[:, None] & (i_k + o_k < k), other=0.0)
        b_w = weight.load([o_n, i_k])
        b_acc = _dot(b_x, b_w, b_acc, WIDE)
        if GATES:
            b_w_up = weight.load([o_up, i_k])
            b_up = _dot(b_x, b_w_up, b_up, WIDE)
    return b_acc, b_up


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _expert_rows(
    p_x,
    p_weight,
    weight,
    p_out,
    p_experts,
    p_pairs,
    p_tiles,
    p_num_tiles,
    num_pairs,
    num_slots,
    n,
    k,
    stride_x,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    SHARED_BY: tl.constexpr,
    LINES: tl.constexpr,
    LINES_BLOCK: tl.constexpr,
    GATES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A row of x serves SHARED_BY pairs."""
    i_slot = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N
    o_m = tl.arange(0, BLOCK_M)
    if LINES:
        # The preceding kernel started after the kernel that chose the experts, so the choice is
        # complete.
        asked, _, count = _find_rows(p_experts, num_pairs, i_slot, PAIRS, BY_PAIR)
        if count > 0:
            _ask_for_weights(p_weight, asked * n + o_n, k, BLOCK_N, LINES, LINES_BLOCK, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    if PAIRS:
        expert, b_rank, count = _find_rows(p_experts, num_pairs, i_slot, PAIRS, BY_PAIR)
    else:
        is_tile = i_slot < tl.load(p_num_tiles)
        expert = tl.load(p_tiles + i_slot, mask=is_tile, other=0)
        p_pairs += tl.load(p_tiles + num_slots + i_slot, mask=is_tile, other=0)
        count = tl.load(p_tiles + 2 * num_slots + i_slot, mask=is_tile, other=0)
    first_n = expert * (2 * n if GATES else n) + o_n
    # A tile of a work list has no more than BLOCK_M rows, and one that is nobody's has none.
    for first_m in range(0, count, BLOCK_M):
        is_row = first_m + o_m < count
        if PAIRS:
            o_pair = tl.arange(0, PAIRS)
            is_pair = b_rank[None, :] == (first_m + o_m)[:, None]
            b_pair = tl.sum(tl.where(is_pair, o_pair[None, :], 0), 1)
        else:
            b_pair = tl.load(p_pairs + first_m + o_m, mask=is_row, other=0)
        p_rows = p_x + (b_pair // SHARED_BY).to(tl.int64)[:, None] * stride_x
        b_acc, b_up = _multiply(
            p_rows,
            is_row,
            weight,
            first_n,
            first_n + n,
            k,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            GATES,
            WIDE,
            STAGES,
        )
        dtype: tl.constexpr = p_out.dtype.element_ty
        b_out = b_acc.to(dtype)
        if GATES:
            # Rounded as a product that is stored.
            b_gate = b_out.to(tl.float32)
            b_up = b_up.to(dtype).to(tl.float32)
            b_out = (gelu_gated(b_gate, b_up) if GELU else gated(b_gate, b_up)).to(dtype)
        o_out = o_n + tl.arange(0, BLOCK_N)
        p_rows_out = p_out + b_pair.to(tl.int64)[:, None] * n + o_out[None, :]
        is_out = is_row[:, None] & (o_out < n)[None, :]
        tl.store(p_rows_out, tl.trans(b_out) if WIDE else b_out, mask=is_out)
