"""Parts that attention kernels for Hopper share: the arithmetic of `online_softmax`, on tiles out
of `hopper_rings`.

A team of four warps owns 64 query rows, in registers. While one team is at its exponentials, the
matrix unit works for the other; within a team the products of a tile run beside the exponentials of
the next. Written in Gluon, Triton's lower level, which no interpreter runs: tests compare its bits
with those of `online_softmax`.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from . import online_softmax
from .online_softmax import BASE_2, GRAIN

oldest_key = gluon.jit(online_softmax.oldest_key.fn)

ROWS = 64
"""Query rows of a team."""
TEAMS = 2
REGISTERS = 240
"""Registers of a thread of a team; the warp that copies has 24."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def num_teams(device: torch.device) -> int:
    """Number of teams for a tile of query rows. Kernels for any GPU take tiles of the same size, so
    that lists of tiles serve both."""
    return TEAMS if is_hopper(device) else 1


@gluon.jit
def begin(
    query,
    rings,
    turn,
    has_next,
    first,
    values: gl.constexpr,
    MASKED: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr = 0,
):
    """Maximum, sums and weights of the first tile of a state, with keys from `first` on. `query`:
    rows, scale of the scores, and positions of the rows. WINDOW as in `online_softmax.oldest_key`
    if it is masked; 0: rows see all keys up to their own."""
    b_q, qk_scale, b_position = query
    k_ring, _, k_ready, _, k_free, _ = rings
    slot = turn % STAGES
    next_slot = (turn + 1) % STAGES
    hopper.mbarrier.wait(k_ready.index(slot), turn // STAGES & 1)
    b_left = _scores(b_q, k_ring.index(2 * slot), HALF)
    b_right = _scores(b_q, k_ring.index(2 * slot + 1), HALF)
    b_left, b_right = hopper.warpgroup_mma_wait(0, deps=[b_left, b_right])
    hopper.mbarrier.arrive(k_free.index(slot), count=1)
    if MASKED:
        b_left, b_right = _hide_unseen(b_left, b_right, first, b_position, HALF, WINDOW)
    b_m = reference(b_left, b_right, qk_scale)
    b_left = weigh(b_left, qk_scale, finite(b_m))
    b_right = weigh(b_right, qk_scale, finite(b_m))
    b_l = fold(fold(b_left + b_right))
    weights: gl.constexpr = gl.DotOperandLayout(0, values, 2)
    b_left = gl.convert_layout(b_left.to(k_ring.dtype), weights)
    b_right = gl.convert_layout(b_right.to(k_ring.dtype), weights)
    hopper.mbarrier.wait(k_ready.index(next_slot), (turn + 1) // STAGES & 1, pred=has_next)
    return b_m, b_l, b_left, b_right


@gluon.jit
def advance(
    query, rings, turn, has_next, starts_split, first, state,
    MASKED: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr = 0,
):  # fmt: skip
    """Scores of a tile, with keys from `first` on, and beside their exponentials the values of the
    tile before, whose weights come in. `query` and WINDOW as in `begin`; `state`: maximum, sums,
    both halves' weights, and the values. Returns the new state, and the factor that its values are
    yet to be scaled by: zero where a split starts."""
    b_q, qk_scale, b_position = query
    b_m, b_l, b_left, b_right, b_acc = state
    k_ring, v_ring, k_ready, v_ready, k_free, v_free = rings
    slot = turn % STAGES
    old_slot = (turn - 1) % STAGES
    next_slot = (turn + 1) % STAGES
    b_s_left = _scores(b_q, k_ring.index(2 * slot), HALF)
    b_s_right = _scores(b_q, k_ring.index(2 * slot + 1), HALF)
    hopper.mbarrier.wait(v_ready.index(old_slot), (turn - 1) // STAGES & 1)
    b_acc = hopper.warpgroup_mma(b_left, v_ring.index(2 * old_slot), b_acc, is_async=True)
    b_acc = hopper.warpgroup_mma(b_right, v_ring.index(2 * old_slot + 1), b_acc, is_async=True)
    b_s_left, b_s_right = hopper.warpgroup_mma_wait(2, deps=[b_s_left, b_s_right])
    hopper.mbarrier.arrive(k_free.index(slot), count=1)

    if MASKED:
        b_s_left, b_s_right = _hide_unseen(b_s_left, b_s_right, first, b_position, HALF, WINDOW)
    b_m_old = gl.where(starts_split, float("-inf"), b_m)
    b_m_new = gl.maximum(b_m_old, reference(b_s_left, b_s_right, qk_scale))
    b_shift = finite(b_m_new) if MASKED else b_m_new
    b_s_left = weigh(b_s_left, qk_scale, b_shift)
    b_s_right = weigh(b_s_right, qk_scale, b_shift)
    b_alpha = gl.exp2(b_m_old - b_shift)
    b_l_new = pinned(gl.fma(b_l, spread(b_alpha, b_l), fold(fold(b_s_left + b_s_right))))
    b_s_left = pinned(b_s_left)
    b_s_right = pinned(b_s_right)

    # NOTE: this wait is here, not before the product that needs it, because the compiler moves
    # nothing across its loop: otherwise exponentials would follow the wait for the values, with
    # nothing beside them on the matrix unit.
    hopper.mbarrier.wait(k_ready.index(next_slot), (turn + 1) // STAGES & 1, pred=has_next)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
    hopper.mbarrier.arrive(v_free.index(old_slot), count=1)
    weights: gl.constexpr = gl.DotOperandLayout(0, b_acc.type.layout, 2)
    b_left = gl.convert_layout(pinned(b_s_left.to(k_ring.dtype), 2), weights)
    b_right = gl.convert_layout(pinned(b_s_right.to(k_ring.dtype), 2), weights)
    return (b_m_new, b_l_new, b_left, b_right, b_acc), b_alpha


@gluon.jit
def conclude(rings, turn, b_left, b_right, b_acc, STAGES: gl.constexpr):
    """Adds the values of the last tile."""
    _, v_ring, _, v_ready, _, v_free = rings
    slot = turn % STAGES
    hopper.mbarrier.wait(v_ready.index(slot), turn // STAGES & 1)
    b_acc = hopper.warpgroup_mma(b_left, v_ring.index(2 * slot), b_acc)
    b_acc = hopper.warpgroup_mma(b_right, v_ring.index(2 * slot + 1), b_acc)
    hopper.mbarrier.arrive(v_free.index(slot), count=1)
    return b_acc


@gluon.jit
def leave_out(rings, turn, num_tiles, STAGES: gl.constexpr):
    """Frees the tiles of a team without rows."""
    _, _, k_ready, v_ready, k_free, v_free = rings
    for i in range(turn, turn + num_tiles):
        slot = i % STAGES
        phase = i // STAGES & 1
        hopper.mbarrier.wait(k_ready.index(slot), phase)
        hopper.mbarrier.arrive(k_free.index(slot), count=1)
        hopper.mbarrier.wait(v_ready.index(slot), phase)
        hopper.mbarrier.arrive(v_free.index(slot), count=1)


@gluon.jit
def row_sums(b_l):
    """Folds [ROWS, 16] to [ROWS]. Eight columns are four threads' pairs, and threads exchange sums
    halves first, as folds."""
    b_pairs = gl.reshape(fold(b_l), (b_l.shape[0], 4, 2))
    b_left, b_right = gl.split(gl.sum(b_pairs, axis=1))
    return b_left + b_right


@gluon.jit
def reference(b_left, b_right, qk_scale):
    """Reference of the weights: the maximum, rounded down."""
    b_m = gl.max(gl.maximum(b_left, b_right), axis=1) * qk_scale
    return gl.floor(b_m * (1.0 / GRAIN)) * GRAIN


@gluon.constexpr_function
def _scaling(count):
    """Assembly that multiplies the first `count` operands by the last ones, unless all threads of
    the warp have ones there, and its constraints. A thread has two rows: its elements 0 and 2 are
    of different ones."""
    products = " ".join(f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    test = (
        f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, "
        "0f3F800000, p;"
    )
    assembly = f"{{ .reg .pred p; {test} vote.sync.any.pred p, p, -1; @!p bra.uni same; {products} same: }}"
    return assembly, ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def scaled(b_acc, b_scale):
    """Product of [ROWS, D] and [ROWS]. It costs next to nothing where all factors are ones, as they
    mostly are."""
    COUNT: gl.constexpr = b_acc.shape[1] // 2
    asm: gl.constexpr = _scaling(COUNT)
    return gl.inline_asm_elementwise(
        asm[0], asm[1], [b_acc, spread(b_scale, b_acc)], dtype=gl.float32, is_pure=False, pack=COUNT
    )


@gluon.jit
def spread(b_row, b_like):
    """Converts [ROWS] to the shape and layout of [ROWS, columns]."""
    b_column = gl.convert_layout(b_row, gl.SliceLayout(1, b_like.type.layout))[:, None]
    b_spread, _ = gl.broadcast(b_column, b_like)
    return b_spread


@gluon.jit
def with_sinks(b_m, b_l, p_sinks, o_head, is_head):
    """Computes `online_softmax.with_sinks`."""
    if p_sinks is not None:
        b_sink = gl.load(p_sinks + o_head, mask=is_head, other=float("-inf"))
        b_log2_e = gl.full(b_sink.shape, BASE_2, gl.float32, b_sink.type.layout)
        b_l = b_l + gl.exp2(gl.fma(b_sink, b_log2_e, -finite(b_m)))
    return b_l


@gluon.jit
def finite(b_m):
    return gl.where(b_m == float("-inf"), 0.0, b_m)


@gluon.jit
def pinned(b_x, PACK: gl.constexpr = 1):
    """The same value, computed here: the compiler would move it behind the wait for a product."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=PACK
    )


@gluon.jit
def _scores(b_q, k_half, HALF: gl.constexpr):
    b_zero = gl.full([b_q.shape[0], HALF], 0.0, gl.float32, b_q.type.layout.parent)
    return hopper.warpgroup_mma(b_q, k_half.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def hide(b_left, b_right, first, b_position, HALF: gl.constexpr):
    """Sets scores of the keys from `first` on that lie after a row's position to minus infinity."""
    o_n = (first + gl.arange(0, HALF, layout=gl.SliceLayout(0, b_left.type.layout)))[None, :]
    b_left = gl.where(o_n <= b_position[:, None], b_left, float("-inf"))
    return b_left, gl.where(o_n + HALF <= b_position[:, None], b_right, float("-inf"))


@gluon.jit
def hide_old(b_left, b_right, first, b_oldest, HALF: gl.constexpr):
    """Sets scores of the keys from `first` on that lie before the oldest one of all rows, or of
    each row, [ROWS, 1], to minus infinity."""
    o_n = (first + gl.arange(0, HALF, layout=gl.SliceLayout(0, b_left.type.layout)))[None, :]
    b_left = gl.where(o_n >= b_oldest, b_left, float("-inf"))
    return b_left, gl.where(o_n + HALF >= b_oldest, b_right, float("-inf"))


@gluon.jit
def _hide_unseen(b_left, b_right, first, b_position, HALF: gl.constexpr, WINDOW: gl.constexpr):
    b_left, b_right = hide(b_left, b_right, first, b_position, HALF)
    if WINDOW:
        b_oldest = oldest_key(b_position, WINDOW)[:, None]
        b_left, b_right = hide_old(b_left, b_right, first, b_oldest, HALF)
    return b_left, b_right


@gluon.jit
def weigh(b_s, qk_scale, b_shift):
    b_scale = gl.full(b_s.shape, 1.0, gl.float32, b_s.type.layout) * qk_scale
    return gl.exp2(gl.fma(b_s, b_scale, spread(-b_shift, b_s)))


@gluon.jit
def fold(b_x):
    """Adds the right half of the columns to the left half."""
    b_halves = gl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2))
    b_left, b_right = gl.split(gl.permute(b_halves, (0, 2, 1)))
    return b_left + b_right
