"""x @ weight.T whose inputs are equal leaves: the leaves' products are added in a tree, in
registers.

A leaf is accumulated in float32 in one order along K, as every product of `gemm`; the products of
neighbours are added as `tree_sum` adds them. So a launch over some of the leaves computes a whole
part of the tree of a launch over more of them, to the bit, and a row's bits depend neither on the
batch nor on the number of outputs. K is never split among programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launch.dependent_launch import launch_options, release_dependents, wait_for_inputs
from .nearest import nearest
from .tree_sum import tree_sum

MOST_LEAVES = 8
BLOCK_KS = (128, 64, 32)
"""Sizes of a step along K. A leaf takes the first that divides it, or the last and masks."""


@dataclass(frozen=True, slots=True)
class TreeTiles:
    block_m: int
    """Rows of x."""
    block_n: int
    most_block_k: int
    num_warps: int
    num_stages: int


# Not measured. The first key is the largest number of rows served, the second whether the weights
# are short: then narrow tiles make programs enough. Up to three sums of the tree are in registers
# beside the accumulator.
TILES = {
    (16, True): TreeTiles(16, 16, 128, 2, 6),
    (16, False): TreeTiles(16, 32, 128, 4, 5),
    (64, True): TreeTiles(64, 16, 128, 4, 4),
    (64, False): TreeTiles(64, 32, 128, 4, 4),
}
MANY_ROWS = TreeTiles(128, 64, 64, 8, 4)
SHORT = 2048
"""Most outputs of short weights."""


def choose(num_rows: int, num_outputs: int) -> TreeTiles:
    """Tiles are a matter of speed alone, whatever the number of leaves."""
    most = next((most for most in (16, 64) if num_rows <= most), None)
    return MANY_ROWS if most is None else TILES[most, num_outputs <= SHORT]


def tree_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    out: torch.Tensor,
    tiles: TreeTiles | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Writes the product of x [M, K] and weight [N, K] to out [M, N], float32 or of x's dtype, to
    which it is rounded once. K is `num_leaves` equal leaves, 1, 2, 4 or 8. `tiles` None: chosen by
    shape."""
    (m, k), n = x.shape, weight.shape[0]
    assert x.dtype == weight.dtype
    assert out.dtype in (x.dtype, torch.float32)
    assert out.shape == (m, n)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1
    assert num_leaves in (1, 2, 4, MOST_LEAVES)
    assert k % num_leaves == 0
    if m == 0:
        return
    tiles = tiles or choose(m, n)
    leaf_len = k // num_leaves
    fitting = [size for size in BLOCK_KS if size <= tiles.most_block_k]
    block_k = next((size for size in fitting if leaf_len % size == 0), fitting[-1])
    _tree_gemm[(triton.cdiv(n, tiles.block_n), triton.cdiv(m, tiles.block_m))](
        x,
        weight,
        out,
        m,
        n,
        leaf_len,
        triton.cdiv(leaf_len, block_k),
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        NUM_LEAVES=num_leaves,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        EVEN_K=leaf_len % block_k == 0,
        DEPENDENT=dependent,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(dependent),
    )


def launch_all_tiles(weight: torch.Tensor, num_leaves: int, dtype: torch.dtype) -> None:
    """Launches every kernel that products with this weight, written in `dtype`, may take, for rows
    that start early and for many rows."""
    for num_rows, dependent in _row_counts():
        x = weight.new_zeros(num_rows, weight.shape[1])
        out = torch.empty(num_rows, len(weight), dtype=dtype, device=weight.device)
        tree_gemm(x, weight, num_leaves, out, dependent=dependent)


def _row_counts() -> Iterator[tuple[int, bool]]:
    for num_rows in sorted({most for most, _ in TILES}):
        yield num_rows, True
    most = max(most for most, _ in TILES)
    yield most + 1, True
    yield most + 1, False


def tree_gemm_twin(x: torch.Tensor, weight: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """The product in plain torch, in float32 or better; not rounded."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    leaves = zip(
        x.to(dtype).chunk(num_leaves, 1), weight.to(dtype).chunk(num_leaves, 1), strict=True
    )
    return tree_sum([some @ those.t() for some, those in leaves])


# NOTE: a number of steps that is known to be 1 would let the compiler add a leaf's product in the
# matrix unit.
@triton.jit(do_not_specialize=["m", "num_steps"])
def _tree_gemm(
    p_x,
    p_w,
    p_out,
    m,
    n,
    leaf_len,
    num_steps,
    stride_x,
    stride_w,
    stride_out,
    NUM_LEAVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    o_k = tl.arange(0, BLOCK_K)[None, :]
    is_m = o_m < m
    is_n = o_n < n
    release_dependents(DEPENDENT)
    p_x += o_m.to(tl.int64) * stride_x + o_k
    p_w += o_n.to(tl.int64) * stride_w + o_k
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Partial sums of the last one, two and four leaves, which wait for as many others.
    b_one = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_two = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_four = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    wait_for_inputs(DEPENDENT)
    for i_step in range(0, NUM_LEAVES * num_steps):
        i_leaf = i_step // num_steps
        i_in = i_step % num_steps
        first = i_leaf * leaf_len + i_in * BLOCK_K
        if EVEN_K:
            b_x = tl.load(p_x + first, mask=is_m, other=0.0)
            b_w = tl.load(p_w + first, mask=is_n, other=0.0)
        else:
            inside = i_in * BLOCK_K + o_k < leaf_len
            b_x = tl.load(p_x + first, mask=is_m & inside, other=0.0)
            b_w = tl.load(p_w + first, mask=is_n & inside, other=0.0)
        b_acc = tl.dot(nearest(b_x), tl.trans(nearest(b_w)), b_acc)
        if (i_in == num_steps - 1) & (i_leaf < NUM_LEAVES - 1):
            if NUM_LEAVES > 4:
                b_four = tl.where(i_leaf == 3, b_two + (b_one + b_acc), b_four)
            if NUM_LEAVES > 2:
                b_two = tl.where(i_leaf % 4 == 1, b_one + b_acc, b_two)
            b_one = tl.where(i_leaf % 2 == 0, b_acc, b_one)
            b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if NUM_LEAVES > 1:
        b_acc = b_one + b_acc
    if NUM_LEAVES > 2:
        b_acc = b_two + b_acc
    if NUM_LEAVES > 4:
        b_acc = b_four + b_acc
    p_out += o_m.to(tl.int64) * stride_out + tl.trans(o_n)
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=is_m & tl.trans(is_n))
