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
from .row_sums import RowSums, SharedRows, add_outputs, clear_counts, make_shares
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
    cleared: torch.Tensor | None = None,
    shared: SharedRows | None = None,
    dependent: bool = False,
) -> None:
    """Writes `silu_mul`, or `gelu_tanh_mul`, of x [T, H] times the weights [E, 2 I, H] of experts
    int32 [T, k] to out [T k, I], a row a pair; and zeros to `cleared`, int32, as many as a power
    of two. The shared expert's rows follow in out [T k + T, I]."""
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
        cleared=cleared,
        shared=shared,
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
    sums: RowSums | None = None,
    shared: SharedRows | None = None,
    knows_experts: bool = True,
    dependent: bool = False,
) -> None:
    """Writes x [rows, I], a row for equally many pairs, times the weights [E, H, I] of their
    experts to out [T k, H]; without a work list also the tokens' sums. With `dependent`, the
    previous kernel may still be writing x. If it does not write the experts, `knows_experts`,
    weights of few pairs are prefetched meanwhile. Rows of a shared expert follow in x and out."""
    assert weight.shape[1] == out.shape[1]
    _launch(
        x,
        weight,
        experts,
        out,
        tiles,
        work,
        gates=False,
        sums=sums,
        shared=shared,
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
    cleared: torch.Tensor | None = None,
    sums: RowSums | None = None,
    shared: SharedRows | None = None,
    dependent: bool,
    asks: bool = False,
) -> None:
    num_experts, _, k = weight.shape
    n = out.shape[1]
    num_pairs = experts.numel()
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert work is None or work.block_m == tiles.block_m
    num_slots = min(num_pairs, num_experts) if work is None else work.max_tiles
    num_parts = triton.cdiv(n, tiles.block_n)
    asks = asks and dependent and work is None and num_pairs <= PAIRS[0]
    assert sums is None or (work is None and len(sums.num_done) >= num_parts)

    def tiled(matrices: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(matrices.view(-1, k), [tiles.block_n, tiles.block_k])

    has_gate = shared is not None and shared.gate is not None
    num_others = 0 if shared is None else 2 if has_gate and gates else 1
    row_lines = triton.cdiv(k * weight.itemsize, LINE_BYTES)
    _expert_rows[(num_slots + num_others, num_parts)](
        x,
        weight,
        tiled(weight),
        None if shared is None else shared.weight,
        None if shared is None else tiled(shared.weight),
        None if shared is None else shared.gate,
        None if shared is None else shared.shares,
        out,
        experts,
        None if work is None else work.pairs,
        None if work is None else work.tiles,
        None if work is None else work.num_tiles,
        None if sums is None else sums.out,
        None if sums is None else sums.weights,
        cleared if sums is None else sums.num_done,
        num_pairs,
        num_slots,
        n,
        k,
        x.stride(0),
        PAIRS=0 if work is not None else next(size for size in PAIRS if num_pairs <= size),
        BY_PAIR=work is None and num_pairs <= num_experts,
        ALONE=work is None and len(experts) == 1,
        SHARED_BY=max(num_pairs // len(x), 1),
        EVEN_K=k % tiles.block_k == 0,
        CHOSEN=experts.shape[1],
        TOKENS=0 if sums is None else triton.next_power_of_2(len(experts)),
        NUM_CLEARED=0 if cleared is None else len(cleared),
        LINES=row_lines if asks else 0,
        SHARED_LINES=row_lines if shared is not None and dependent else 0,
        LINES_BLOCK=triton.next_power_of_2(row_lines),
        WIDTH_BLOCK=triton.next_power_of_2(k),
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
def _find_rows(
    p_experts,
    num_pairs,
    i_slot,
    num_slots,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ALONE: tl.constexpr,
):
    """The expert of a slot, the rank of each pair [PAIRS] among its pairs, and their number. With
    BY_PAIR a slot is a pair and has the rows of its expert if none before it has; otherwise it is
    an expert. Pairs of expert −1 are no slot's, and slots behind the last one have none. ALONE: the
    pairs are one token's, whose experts differ."""
    o_pair = tl.arange(0, PAIRS)
    if ALONE:
        expert = tl.load(p_experts + i_slot, mask=i_slot < num_slots, other=-1)
        return expert, tl.where(o_pair == i_slot, 0, -1), (expert >= 0).to(tl.int32)
    b_expert = tl.load(p_experts + o_pair, mask=o_pair < num_pairs, other=-1)
    expert = i_slot
    if BY_PAIR:
        expert = tl.load(p_experts + i_slot, mask=i_slot < num_slots, other=-1)
    is_mine = b_expert == expert
    b_rank = tl.where(is_mine, tl.cumsum(is_mine.to(tl.int32), 0) - 1, -1)
    count = tl.sum(is_mine.to(tl.int32), 0)
    if BY_PAIR:
        first = tl.min(tl.where(is_mine, o_pair, PAIRS), 0)
        count = tl.where((first == i_slot) & (expert >= 0), count, 0)
    return expert, b_rank, count


@triton.jit
def _pairs_of(p_pairs, b_rank, o_row, is_row, i_slot, PAIRS: tl.constexpr, ALONE: tl.constexpr):
    """The pairs whose rows a slot has, of the work list or as `_find_rows` ranks them."""
    if ALONE:
        b_pair = o_row * 0 + i_slot
    elif PAIRS:
        o_pair = tl.arange(0, PAIRS)
        is_pair = b_rank[None, :] == o_row[:, None]
        b_pair = tl.sum(tl.where(is_pair, o_pair[None, :], 0), 1)
    else:
        b_pair = tl.load(p_pairs + o_row, mask=is_row, other=0)
    return b_pair


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
def _ask_for_shared(p_weight, is_asked, o_n, n, k, lines: tl.constexpr):
    """Like `_ask_for_weights`, for the shared expert, by its program alone."""
    BLOCK_N: tl.constexpr = lines[0]
    if is_asked:
        _ask_for_weights(p_weight, o_n, k, BLOCK_N, lines[1], lines[2], lines[4])
        if lines[3]:
            _ask_for_weights(p_weight, n + o_n, k, BLOCK_N, lines[1], lines[2], lines[4])


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


@triton.jit
def _make_tile(p_rows, is_row, weight, expert, p_out, b_to, o_n, n, k, tile: tl.constexpr):
    """Writes products of rows p_rows [M, 1] with outputs of an expert from o_n on to rows b_to."""
    GATES: tl.constexpr = tile[0]
    BLOCK_N: tl.constexpr = tile[3]
    WIDE: tl.constexpr = tile[6]
    first_n = expert * (2 * n if GATES else n) + o_n
    b_acc, b_up = _multiply(
        p_rows,
        is_row,
        weight,
        first_n,
        first_n + n,
        k,
        tile[2],
        BLOCK_N,
        tile[4],
        tile[5],
        GATES,
        WIDE,
        tile[7],
    )
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_out = b_acc.to(dtype)
    if GATES:
        # Rounded as a product that is stored.
        b_gate = b_out.to(tl.float32)
        b_up = b_up.to(dtype).to(tl.float32)
        b_out = (gelu_gated(b_gate, b_up) if tile[1] else gated(b_gate, b_up)).to(dtype)
    o_out = o_n + tl.arange(0, BLOCK_N)
    p_to = p_out + b_to.to(tl.int64)[:, None] * n + o_out[None, :]
    is_out = is_row[:, None] & (o_out < n)[None, :]
    tl.store(p_to, tl.trans(b_out) if WIDE else b_out, mask=is_out)


@triton.jit
def _make_shared_rows(
    p_x, shared, p_out, first_out, count, stride_x, o_n, n, k, tile: tl.constexpr
):
    """As `_make_tile`, of so many rows of x and all that the shared expert makes of them."""
    BLOCK_M: tl.constexpr = tile[2]
    for first_m in range(0, count, BLOCK_M):
        o_row = first_m + tl.arange(0, BLOCK_M)
        p_rows = p_x + o_row.to(tl.int64)[:, None] * stride_x
        _make_tile(p_rows, o_row < count, shared, 0, p_out, first_out + o_row, o_n, n, k, tile)


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def _expert_rows(
    p_x,
    p_weight,
    weight,
    p_shared,
    shared,
    p_gate,
    p_shares,
    p_out,
    p_experts,
    p_pairs,
    p_tiles,
    p_num_tiles,
    p_sums,
    p_weights,
    p_num_done,
    num_pairs,
    num_slots,
    n,
    k,
    stride_x,
    PAIRS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ALONE: tl.constexpr,
    SHARED_BY: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_CLEARED: tl.constexpr,
    LINES: tl.constexpr,
    SHARED_LINES: tl.constexpr,
    LINES_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
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
    """A row of x serves SHARED_BY pairs. With `shared`, a slot behind the others is the shared
    expert's, which has a row of each token, and another one makes its shares."""
    tile: tl.constexpr = (GATES, GELU, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, STAGES)
    HAS_SHARED: tl.constexpr = shared is not None
    i_slot = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N
    o_m = tl.arange(0, BLOCK_M)
    if LINES:
        # The preceding kernel started after the kernel that chose the experts, so the choice is
        # complete.
        asked, _, count = _find_rows(p_experts, num_pairs, i_slot, num_slots, PAIRS, BY_PAIR, ALONE)
        if count > 0:
            _ask_for_weights(p_weight, asked * n + o_n, k, BLOCK_N, LINES, LINES_BLOCK, DEPENDENT)
    if SHARED_LINES:
        is_asked = i_slot == num_slots
        lines: tl.constexpr = (BLOCK_N, SHARED_LINES, LINES_BLOCK, GATES, DEPENDENT)
        _ask_for_shared(p_shared, is_asked, o_n, n, k, lines)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    if NUM_CLEARED:
        clear_counts(p_num_done, NUM_CLEARED)
    if PAIRS:
        expert, b_rank, count = _find_rows(
            p_experts, num_pairs, i_slot, num_slots, PAIRS, BY_PAIR, ALONE
        )
    else:
        is_tile = i_slot < tl.load(p_num_tiles)
        expert = tl.load(p_tiles + i_slot, mask=is_tile, other=0)
        b_rank = 0
        p_pairs += tl.load(p_tiles + num_slots + i_slot, mask=is_tile, other=0)
        count = tl.load(p_tiles + 2 * num_slots + i_slot, mask=is_tile, other=0)
    # A tile of a work list has no more than BLOCK_M rows, and one that is nobody's has none.
    for first_m in range(0, count, BLOCK_M):
        is_row = first_m + o_m < count
        b_pair = _pairs_of(p_pairs, b_rank, first_m + o_m, is_row, i_slot, PAIRS, ALONE)
        p_rows = p_x + (b_pair // SHARED_BY).to(tl.int64)[:, None] * stride_x
        _make_tile(p_rows, is_row, weight, expert, p_out, b_pair, o_n, n, k, tile)
    if HAS_SHARED:
        num_tokens = num_pairs // CHOSEN
        p_from = p_x if GATES else p_x + num_pairs * stride_x
        count = tl.where(i_slot == num_slots, num_tokens, 0)
        _make_shared_rows(p_from, shared, p_out, num_pairs, count, stride_x, o_n, n, k, tile)
        if p_gate is not None:
            count = tl.where((i_slot > num_slots) & (o_n == 0), num_tokens, 0)
            make_shares(p_x, p_gate, p_shares, count, stride_x, k, WIDTH_BLOCK)
    if TOKENS:
        add_outputs(
            p_out,
            p_sums,
            p_weights,
            p_shares,
            p_num_done,
            num_pairs,
            num_slots + 1,
            o_n + tl.arange(0, BLOCK_N),
            n,
            CHOSEN,
            TOKENS,
        )
