"""Times products with weights of four bits on a GPU beside those with the expanded matrix, and
compares their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from headwater.kernels.gemm.gemm import linear
from headwater.kernels.gemm.int4_gemm import TILES, expanded, int4_gemm, int4_linear
from headwater.kernels.quant.int4_layout import WORD, Int4Weight

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed


def random_int4(
    n: int, k: int, group_size: int, *, in_order: bool = True,
    scale_dtype: torch.dtype = torch.float16, symmetric: bool = False,
) -> Int4Weight:  # fmt: skip
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // WORD), device="cuda").int()
    scales = (torch.rand(k // group_size, n, device="cuda") * 0.01).to(scale_dtype)
    zeros = (
        None if symmetric else torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    )
    groups = torch.randperm(k, device="cuda").int() // group_size
    return Int4Weight(words=words, scales=scales, zeros=zeros, groups=None if in_order else groups)


def time_int4(
    name: str, n: int, k: int, batch_sizes: tuple[int, ...], group_size: int = 128
) -> Iterator[Figure]:
    """Times weights of four bits beside the same weights expanded, each number of rows with all
    tiles that may serve it."""
    num_bytes = n * k // 2 + n * k // group_size * 3
    weights = [random_int4(n, k, group_size) for _ in range(copies_for(num_bytes))]
    matrices = [expanded(weight, torch.bfloat16) for weight in weights[: copies_for(2 * n * k)]]
    unordered = random_int4(n, k, group_size, in_order=False)
    for m in batch_sizes:
        x = randn(m, k)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        same = torch.equal(int4_linear(x, weights[0]), linear(x, matrices[0], is_own=True))
        calls = weights * (2 if len(weights) < 8 else 1)
        ours = timed([partial(int4_linear, x, weight, dependent=True) for weight in calls])
        dense = timed([partial(linear, x, matrix, out, dependent=True) for matrix in matrices])
        by_input = timed([partial(int4_linear, x, unordered, dependent=True)] * 4, replays=5)
        each = {
            f"by {tiles.block_m}": timed(
                [partial(int4_gemm, x, weight, out, tiles, dependent=True) for weight in calls],
                replays=5,
            )
            for tiles in TILES.values()
            if m <= 1024
        }
        flops = 2 * m * n * k
        limit = max((num_bytes + 2 * m * (n + k)) / BYTES_PER_US, flops / FLOPS_PER_US)
        read = (
            f"{100 * num_bytes / ours / BYTES_PER_US:.0f} % of bandwidth, "
            f"{flops / ours / 1e6:.0f} TFLOP/s"
        )
        note = (
            f"{'same bits' if same else 'OTHER BITS'}, {read}; bf16 {dense:.1f}, act order "
            f"{by_input:.1f}; "
        )
        note += ", ".join(f"{tiles} {us:.1f}" for tiles, us in each.items())
        yield Figure("4 bits a weight", f"{name} M={m}", ours, limit, note)


SCALES: dict[str, tuple[torch.dtype, bool]] = {
    "float16 scales, symmetric": (torch.float16, True),
    "bfloat16 scales": (torch.bfloat16, False),
    "bfloat16 scales, symmetric": (torch.bfloat16, True),
}


def time_scales(
    name: str, n: int, k: int, batch_sizes: tuple[int, ...], group_size: int = 128
) -> Iterator[Figure]:
    """Times weights of four bits by the dtype of their scales, with zero points and without."""
    for kind, (dtype, symmetric) in SCALES.items():
        num_bytes = n * k // 2 + n * k // group_size * (2 if symmetric else 3)
        weights = [
            random_int4(n, k, group_size, scale_dtype=dtype, symmetric=symmetric)
            for _ in range(copies_for(num_bytes))
        ]
        matrix = expanded(weights[0], torch.bfloat16)
        for m in batch_sizes:
            x = randn(m, k)
            same = torch.equal(int4_linear(x, weights[0]), linear(x, matrix, is_own=True))
            ours = timed([partial(int4_linear, x, weight, dependent=True) for weight in weights])
            note = f"{'same bits' if same else 'OTHER BITS'}, {kind}"
            yield Figure("4 bits a weight", f"{name} M={m}", ours, num_bytes / BYTES_PER_US, note)


def int4_products(linears: Mapping[str, tuple[int, int]]) -> Iterator[Figure]:
    """Times a square matrix at many numbers of rows, then [N, K] of the given names, those of
    Qwen3-8B, at few."""
    yield from time_int4("8192 x 8192", 8192, 8192, (1, 4, 16, 64, 128, 256, 512, 1024, 4096))
    yield from time_scales("8192 x 8192", 8192, 8192, (1, 16))
    for name, (n, k) in linears.items():
        yield from time_int4(name, n, k, (1, 16))
        yield from time_scales(name, n, k, (1,))
