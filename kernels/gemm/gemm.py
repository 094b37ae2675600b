"""x @ weight.T for every batch size, one arithmetic: no product is ever split along K, so a row's
bits are its own.

The kernels here, `hopper_few_rows_gemm`, `hopper_ring_gemm`, `hopper_rows_gemm` and `wide_gemm`
accumulate in one order by construction. cuBLASLt with a workspace too small for split-K does so
too, as far as `product_probe` sees; where it does not, `wide_gemm` takes its place. Which of them
runs is otherwise a matter of speed alone and is decided in `choose`, `choose_rows`,
`choose_few_rows` and `choose_ring`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import ask_early, launch_options, release_dependents, wait_for_inputs
from ..norm.silu_mul import gated, silu_mul
from .add_bias import add_bias
from .gated_gemm import gated_gemm, is_gated_at_once
from .hopper_few_rows_gemm import FewRowTiles, few_rows_gemm
from .hopper_few_rows_gemm import serves as serves_few
from .hopper_ring_gemm import RingTiles, has_room, ring_gemm
from .hopper_ring_gemm import serves as serves_ring
from .hopper_rows_gemm import RowTiles, rows_gemm, serves
from .nearest import nearest
from .wide_gemm import matrices, wide_gemm


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a Triton product. `wide` hands the weights to the matrix unit as the operand with
    the many rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    wide: bool


# Measured on an H200 (docs/benchmarks/kernels.md); the first key is the largest M served, the
# second whether the weights are short (a narrow tile makes programs enough), tall (programs enough
# without being wide) or between.
TILES = {
    (16, "short"): Tiles(16, 16, 512, 2, 6, wide=False),
    (16, "between"): Tiles(16, 64, 128, 4, 6, wide=True),
    (16, "tall"): Tiles(16, 64, 128, 2, 4, wide=False),
    (32, "short"): Tiles(32, 16, 512, 2, 4, wide=False),
    (32, "between"): Tiles(32, 64, 128, 4, 6, wide=True),
}
HALF_TILES = Tiles(16, 64, 64, 4, 10, wide=True)
FEWEST = 64
"""Tiles for 2 to 16 rows whose weights have few outputs and inputs that divide by 64 and not by
128. On an H200 16 rows of [5120, 2880] take 10.5 us with them, 11.6 us with six stages of 64 inputs
(2026-11-29)."""
GATED = Tiles(16, 32, 128, 2, 4, wide=False)
"""Tiles of gates and of as many columns that they gate."""
GATED_ROWS = 16
ROW_TILES = {
    (64, "short"): RowTiles(64, 16, 128, 10),
    (64, "between"): RowTiles(64, 64, 128, 6),
    (64, "gates"): RowTiles(64, 64, 128, 4),
    (128, "short"): RowTiles(64, 32, 128, 8),
    (128, "between"): RowTiles(64, 64, 128, 6),
    (128, "gates"): RowTiles(64, 64, 64, 8),
    (192, "short"): RowTiles(64, 64, 128, 6),
    (192, "between"): RowTiles(64, 64, 128, 3),
    (256, "short"): RowTiles(64, 64, 128, 6),
    (256, "between"): RowTiles(128, 64, 128, 4),
    (256, "gates"): RowTiles(128, 64, 64, 6),
}
"""Tiles for weights up to EARLY_BYTES, whose product takes as long to start as to run: most weights
that a program reads are in shared memory before its rows are there. Measured in a chain of layers;
gates of 129 to 192 rows are better left to cuBLASLt."""
FEW_ROW_TILES = {"short": FewRowTiles(16), "between": FewRowTiles(32), "gates": FewRowTiles(32)}
"""Tiles of weights up to FEW_ROW_BYTES for up to 16 rows, measured in a chain of layers of 0.6B. A
short product of more than MAX_SHORT inputs has less room beside its neighbours than it gains."""
FEW_ROW_BYTES = 12 << 20
MAX_SHORT = 2048
RING_TILES = RingTiles(64, 32, 4, 225 << 10)
"""Tiles of weights of more bytes that they divide into MIN_RING_PROGRAMS, for up to 16 rows. On an
H200 a norm and a product [12288, 2048] with a second one [64, 2048] take 14.8 us in place of 18.6
with one row, and 16.7 in place of 19.7 with 16 (2026-11-30)."""
MIN_RING_PROGRAMS = 96
SHORT_RING_TILES = RingTiles(16, 0, 4, 130 << 10)
"""Tiles of such weights with few outputs: [2048, 4096] take 8.6 us in place of 10.6."""
MAX_RING = {False: 2048, True: 4096}
"""Most inputs of weights of many and of few outputs."""
MIN_ROWS = 17
MIN_GATED_ROWS = 9
"""Least numbers of rows, without and with gates. With fewer rows the narrow tiles start as fast."""
EARLY_BYTES = 16 << 20
"""Bytes of the largest weights that a dependent product prefetches before its inputs are ready:
they wait in the L2 cache beside those in use. Parts of larger weights would only displace each
other."""
SHORT = 2048
TALL = 16_384
DEEP = 8192
"""Value of K from which cuBLASLt keeps more bytes in flight at more than 16 rows."""
EXPERIMENTAL = b"torch.backends.cuda.preferred_blas_library is an experimental feature"
"""Text of the line that torch writes to stderr, past Python's warnings, when a library is
preferred."""


def choose(m: int, n: int, k: int) -> Tiles | None:
    """The tiles for [m, k] x [n, k]; None: cuBLASLt computes the product."""
    most = 16 if m <= 16 else 32
    if m > most or (m > 16 and (n >= TALL or k >= DEEP)):
        return None
    is_half = k % (2 * HALF_TILES.block_k) == HALF_TILES.block_k
    if is_half and m <= HALF_TILES.block_m and (n <= FEWEST or SHORT < n < TALL):
        return HALF_TILES
    return TILES[most, "short" if n <= SHORT else "tall" if n >= TALL else "between"]


def choose_rows(x: torch.Tensor, weight: torch.Tensor, *, gates: bool = False) -> RowTiles | None:
    """The tiles of `hopper_rows_gemm` for x [M, K], weight [N, K]; None: another kernel computes
    the product."""
    m = x.shape[0]
    n = weight.shape[0]
    kind = "gates" if gates else "short" if n <= SHORT else "between"
    tiles = ROW_TILES.get((-(-m // 64) * 64, kind))
    if (
        tiles is None
        or m < (MIN_GATED_ROWS if gates else MIN_ROWS)
        or _num_bytes(weight) > EARLY_BYTES
    ):
        return None
    return tiles if serves(x, weight, tiles, gates=gates) else None


def choose_few_rows(
    x: torch.Tensor, weight: torch.Tensor, *, gates: bool = False
) -> FewRowTiles | None:
    """Like `choose_rows`, for `hopper_few_rows_gemm`."""
    n, k = weight.shape
    is_short = n <= SHORT and not gates
    if _num_bytes(weight) > FEW_ROW_BYTES or (is_short and k > MAX_SHORT):
        return None
    tiles = FEW_ROW_TILES["gates" if gates else "short" if is_short else "between"]
    return tiles if serves_few(x, weight, tiles, gates=gates) else None


def choose_ring(x: torch.Tensor, weight: torch.Tensor) -> RingTiles | None:
    """Like `choose_rows`, for `hopper_ring_gemm`."""
    n, k = weight.shape
    if n >= TALL or k > MAX_RING[n <= SHORT] or _num_bytes(weight) <= FEW_ROW_BYTES:
        return None
    tiles = SHORT_RING_TILES if n <= SHORT else RING_TILES
    is_served = n >= MIN_RING_PROGRAMS * tiles.block_n and serves_ring(x, weight, tiles)
    return tiles if is_served else None


def uses_library(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` leaves x [M, K], weight [N, K] to cuBLASLt by default."""
    return choose_rows(x, weight) is None and choose(x.shape[0], *weight.shape) is None


def configure_blas() -> None:
    """Makes torch's products obey the rule above; call once in a process, before the first product
    on a GPU."""
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    with _without_line(EXPERIMENTAL):
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@contextmanager
def _without_line(text: bytes) -> Iterator[None]:
    """Removes lines with the text from the standard error that is written in the scope, by C++ too.
    All other lines follow at its end."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if text not in line:
                    os.write(2, line)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dependent: bool = False,
    is_own: bool = False,
) -> torch.Tensor:
    """x [M, K] times weight [N, K]: out [M, N] in x's dtype, accumulated in float32. With `is_own`
    only Headwater's kernels are used: the library's product of these has other bits. A bias [N] is
    added to the rounded product, and the sum rounded again."""
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    few_tiles = choose_few_rows(x, weight)
    row_tiles = choose_rows(x, weight)
    ring_tiles = choose_ring(x, weight)
    tiles = choose(x.shape[0], *weight.shape)
    if few_tiles is not None:
        few_rows_gemm(x, weight, out, few_tiles, gates=False, dependent=dependent)
    elif ring_tiles is not None:
        ring_gemm(x, weight, out, ring_tiles, dependent=dependent)
    elif row_tiles is not None:
        rows_gemm(x, weight, out, row_tiles, gates=False, dependent=dependent)
    elif tiles is not None:
        skinny_gemm(x, weight, out, tiles, bias=bias, dependent=dependent)
        return out
    elif is_own:
        wide_gemm(x, weight, out)
    else:
        library_gemm(x, weight, out)
    if bias is not None:
        add_bias(out, bias, dependent=dependent)
    return out


def linear_pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    second: torch.Tensor,
    *,
    dependent: bool = False,
    are_own: tuple[bool, bool] = (False, False),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The products that `linear` makes of x [M, K] and two weights, [N, K] and [N', K]; of few rows
    in one launch."""
    tiles = choose_ring(x, weight)
    if tiles is None or not has_room(tiles, weight, second):
        return (
            linear(x, weight, dependent=dependent, is_own=are_own[0]),
            linear(x, second, dependent=dependent, is_own=are_own[1]),
        )
    out, second_out = (x.new_empty(len(x), len(each)) for each in (weight, second))
    ring_gemm(x, weight, out, tiles, second=second, second_out=second_out, dependent=dependent)
    return out, second_out


def library_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    bias: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    grid = triton.cdiv(out.shape[1], tiles.block_n), triton.cdiv(len(x), tiles.block_m)
    _skinny_gemm[grid](
        bias,
        *matrices(x, weight, out),
        WIDE=tiles.wide,
        **_constants(weight, tiles, dependent=dependent),
    )


def _constants(weight: torch.Tensor, tiles: Tiles, *, dependent: bool) -> dict[str, int | bool]:
    block_k = tile_inputs(weight, tiles)
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": block_k,
        "EVEN_K": weight.shape[1] % block_k == 0,
        "DEPENDENT": dependent,
        "EARLY_K": _early_k(weight, block_k, dependent=dependent),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    } | launch_options(dependent)


def tile_inputs(weight: torch.Tensor, tiles: Tiles) -> int:
    """Number of inputs of a tile of weight [N, K]: a power of two, which divides K where possible,
    so that loads need no mask. Tiles of weights of four bytes have half as many, to fit in shared
    memory."""
    sizes = [size * 2 // weight.element_size() for size in (tiles.block_k, 128, 64)]
    return next((size for size in sizes if weight.shape[1] % size == 0), sizes[-1])


def _early_k(weight: torch.Tensor, block_k: int, *, dependent: bool) -> int:
    """Part of K that a program prefetches before it waits, in whole tiles."""
    is_small = _num_bytes(weight) <= EARLY_BYTES
    return weight.shape[1] // block_k * block_k if dependent and is_small else 0


def _num_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, *, dependent: bool = False, is_own: bool = False
) -> torch.Tensor:
    """`silu_mul` of the product of x [M, K] and weight [2 I, K], gates first: [M, I], with the same
    bits; in one launch, which keeps the product in registers, where that is as fast. `is_own` as in
    `linear`."""
    m = x.shape[0]
    n = weight.shape[0] // 2
    if is_gated_at_once(x, weight):
        gated_gemm(x, weight, out := x.new_empty(m, n))
        return out
    few_tiles = choose_few_rows(x, weight, gates=True)
    row_tiles = choose_rows(x, weight, gates=True)
    if few_tiles is not None:
        few_rows_gemm(
            x, weight, out := x.new_empty(m, n), few_tiles, gates=True, dependent=dependent
        )
        return out
    if row_tiles is not None:
        rows_gemm(x, weight, out := x.new_empty(m, n), row_tiles, gates=True, dependent=dependent)
        return out
    if m <= GATED_ROWS and n % GATED.block_n == 0:
        skinny_gated_gemm(x, weight, out := x.new_empty(m, n), dependent=dependent)
        return out
    return silu_mul(linear(x, weight, dependent=dependent, is_own=is_own), dependent=dependent)


def skinny_gated_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, dependent: bool = False
) -> None:
    """Writes the gated product of x [M, K] and weight [2 I, K] to out [M, I]; I is a multiple of
    the tile's width."""
    assert out.shape[1] % GATED.block_n == 0
    grid = out.shape[1] // GATED.block_n, triton.cdiv(len(x), GATED.block_m)
    _skinny_gated_gemm[grid](
        *matrices(x, weight, out), **_constants(weight, GATED, dependent=dependent)
    )


def linear_twin(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in plain torch, in float32 or better; not rounded."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) @ weight.to(dtype).t()


@triton.jit
def multiply_tiles(
    p_x, p_w, is_m, is_n, k, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr
):
    """Product of rows p_x [M, 1] and rows p_w [N, 1] over all of K: [N, M] when WIDE and [M, N]
    otherwise."""
    o_k = tl.arange(0, BLOCK_K)[None, :]
    if WIDE:
        b_acc = tl.zeros((p_w.shape[0], p_x.shape[0]), tl.float32)
    else:
        b_acc = tl.zeros((p_x.shape[0], p_w.shape[0]), tl.float32)
    for i_k in range(0, k, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x + i_k + o_k, mask=is_m, other=0.0)
            b_w = tl.load(p_w + i_k + o_k, mask=is_n, other=0.0)
        else:
            b_x = tl.load(p_x + i_k + o_k, mask=is_m & (i_k + o_k < k), other=0.0)
            b_w = tl.load(p_w + i_k + o_k, mask=is_n & (i_k + o_k < k), other=0.0)
        b_x = nearest(b_x)
        b_w = nearest(b_w)
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc) if WIDE else tl.dot(b_x, tl.trans(b_w), b_acc)
    return b_acc


@triton.jit
def _ask_for_weights(
    p_w, o_n, is_n, stride_w, DEPENDENT: tl.constexpr, BLOCK_K: tl.constexpr, EARLY_K: tl.constexpr
):
    """Prefetches the first EARLY_K columns of rows o_n [N, 1]; rows past the last one prefetch its
    lines again."""
    LINE: tl.constexpr = 128 // (p_w.dtype.element_ty.primitive_bitwidth // 8)
    p_lines = (
        p_w
        + tl.where(is_n, o_n, 0).to(tl.int64) * stride_w
        + tl.arange(0, BLOCK_K // LINE)[None, :] * LINE
    )
    for i_k in range(0, EARLY_K, BLOCK_K):
        ask_early(p_lines + i_k, DEPENDENT)


# Two kernels: one for a single row, which needs no masks, and one for all other numbers of rows.
@triton.jit(do_not_specialize_on_alignment=["m"])
def _skinny_gemm(
    p_bias,
    p_x,
    p_w,
    p_out,
    m,
    n,
    k,
    stride_x,
    stride_w,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY_K: tl.constexpr,
):
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    is_m = o_m < m
    is_n = o_n < n
    release_dependents(DEPENDENT)
    _ask_for_weights(p_w, o_n, is_n, stride_w, DEPENDENT, BLOCK_K, EARLY_K)
    wait_for_inputs(DEPENDENT)
    b_acc = multiply_tiles(
        p_x + o_m * stride_x,
        p_w + o_n.to(tl.int64) * stride_w,
        is_m,
        is_n,
        k,
        BLOCK_K,
        EVEN_K,
        WIDE,
    )
    b_out = b_acc.to(p_out.dtype.element_ty)
    if p_bias is not None:
        # Rounded as a product that is stored.
        o_bias = o_n if WIDE else tl.trans(o_n)
        b_bias = tl.load(p_bias + o_bias, mask=o_bias < n, other=0.0)
        b_out = (b_out.to(tl.float32) + b_bias.to(tl.float32)).to(p_out.dtype.element_ty)
    if WIDE:
        tl.store(p_out + tl.trans(o_m) * stride_out + o_n, b_out, mask=tl.trans(is_m) & is_n)
    else:
        tl.store(p_out + o_m * stride_out + tl.trans(o_n), b_out, mask=is_m & tl.trans(is_n))


@triton.jit(do_not_specialize_on_alignment=["m"])
def _skinny_gated_gemm(
    p_x,
    p_w,
    p_out,
    m,
    n,
    k,
    stride_x,
    stride_w,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY_K: tl.constexpr,
):
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    is_m = o_m < m
    is_n = o_n < n
    release_dependents(DEPENDENT)
    _ask_for_weights(p_w, o_n, is_n, stride_w, DEPENDENT, BLOCK_K, EARLY_K)
    _ask_for_weights(p_w, n + o_n, is_n, stride_w, DEPENDENT, BLOCK_K, EARLY_K)
    p_x += o_m * stride_x + o_k
    p_gate = p_w + o_n.to(tl.int64) * stride_w + o_k
    p_up = p_w + (n + o_n).to(tl.int64) * stride_w + o_k
    b_gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_inputs(DEPENDENT)
    for i_k in range(0, k, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x + i_k, mask=is_m, other=0.0)
            b_w_gate = tl.load(p_gate + i_k)
            b_w_up = tl.load(p_up + i_k)
        else:
            inside = i_k + o_k < k
            b_x = tl.load(p_x + i_k, mask=is_m & inside, other=0.0)
            b_w_gate = tl.load(p_gate + i_k, mask=inside, other=0.0)
            b_w_up = tl.load(p_up + i_k, mask=inside, other=0.0)
        b_x = nearest(b_x)
        b_gate = tl.dot(b_x, tl.trans(nearest(b_w_gate)), b_gate)
        b_up = tl.dot(b_x, tl.trans(nearest(b_w_up)), b_up)
    # Rounded as a product that is stored.
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_out = gated(b_gate.to(dtype).to(tl.float32), b_up.to(dtype).to(tl.float32))
    tl.store(p_out + o_m * stride_out + tl.trans(o_n), b_out.to(dtype), mask=is_m)
