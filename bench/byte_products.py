"""Times products with weights of eight bits on a GPU beside those with the expanded matrix, and
compares their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from headwater.kernels.gemm.byte_gemm import byte_linear, expanded
from headwater.kernels.gemm.gemm import linear
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.gemm.w8a8 import w8a8_linear
from headwater.kernels.quant.token_rounding import Rounding, round_tokens

from .byte_layers import random_weight
from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed

EARLY_ROWS = 512
"""Up to this many rows kernels start while the one before them ends, as in an engine."""
GROUP_SIZE = 128
"""Inputs that share a scale."""


def random_fp8(n: int, k: int) -> PackedWords:
    # Numbers without the highest exponents, some of which are NaN.
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // 4), device="cuda").int() & -0x40404041
    return PackedWords(
        words=words, scales=torch.rand(k // GROUP_SIZE, n, device="cuda"), zeros=None, bits=8
    )


def random_int8(n: int, k: int) -> PackedWords:
    words = torch.randint(-(1 << 31), 1 << 31, (n, k // 4), device="cuda").int()
    scales = (torch.rand(k // GROUP_SIZE, n, device="cuda") * 0.01).half()
    return PackedWords(
        words=words, scales=scales, zeros=torch.full_like(scales, 128, dtype=torch.uint8), bits=8
    )


MAKERS = {"fp8": random_fp8, "int8": random_int8}


def time_bytes(
    kind: str, name: str, n: int, k: int, batch_sizes: tuple[int, ...]
) -> Iterator[Figure]:
    """Times weights of a kind beside the same weights expanded."""
    num_bytes = n * k + n * k // GROUP_SIZE * (4 if kind == "fp8" else 3)
    weights = [MAKERS[kind](n, k) for _ in range(copies_for(num_bytes))]
    matrices = [expanded(weight, torch.bfloat16) for weight in weights[: copies_for(2 * n * k)]]
    for m in batch_sizes:
        x = randn(m, k)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        same = torch.equal(byte_linear(x, weights[0]), linear(x, matrices[0], is_own=True))
        calls = weights * (2 if len(weights) < 8 else 1)
        ours = timed([partial(byte_linear, x, weight, dependent=True) for weight in calls])
        dense = timed([partial(linear, x, matrix, out, dependent=True) for matrix in matrices])
        limit = max((num_bytes + 2 * m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US)
        note = f"{'same bits' if same else 'OTHER BITS'}; bf16 {dense:.1f}"
        yield Figure(f"{kind} weights", f"{name} M={m}", ours, limit, note)


def time_w8a8(
    rounding: Rounding, name: str, n: int, k: int, batch_sizes: tuple[int, ...]
) -> Iterator[Figure]:
    """Times products of weights and tokens of eight bits, the rounding of tokens included, beside
    bfloat16 ones."""
    weights = [random_weight(rounding, n, k) for _ in range(copies_for(n * k))]
    matrices = [randn(n, k) for _ in range(copies_for(2 * n * k))]
    for m in batch_sizes:
        x = randn(m, k)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        own = w8a8_linear(x, weights[0])
        same = torch.equal(own[:1], w8a8_linear(x[:1], weights[0]))
        rounded = round_tokens(x, rounding)
        ours = timed(
            [partial(w8a8_linear, x, weight, dependent=m <= EARLY_ROWS) for weight in weights]
        )
        product = timed(
            [partial(w8a8_linear, rounded, weight, dependent=m <= EARLY_ROWS) for weight in weights]
        )
        dense = timed([partial(linear, x, matrix, out, dependent=True) for matrix in matrices])
        limit = max((n * k + 2 * m * (n + k)) / BYTES_PER_US, m * n * k / FLOPS_PER_US)
        note = (
            f"{'same bits' if same else 'OTHER BITS'} as alone; without rounding "
            f"{product:.1f}; bf16 {dense:.1f}"
        )
        kind = (
            f"{str(rounding.dtype).removeprefix('torch.')} by "
            f"itself{' in blocks' if rounding.group else ''}"
        )
        yield Figure(kind, f"{name} M={m}", ours, limit, note)


def byte_products(linears: Mapping[str, tuple[int, int]]) -> Iterator[Figure]:
    """Times a square matrix at many numbers of rows, then [N, K] of the given names, those of
    Qwen3-8B, at few."""
    for kind in MAKERS:
        yield from time_bytes(kind, "8192 x 8192", 8192, 8192, (1, 16, 64, 128, 256, 512, 1024))
        for name, (n, k) in linears.items():
            yield from time_bytes(kind, name, n, k, (1, 16))
    for rounding in (
        Rounding(torch.float8_e4m3fn),
        Rounding(torch.float8_e4m3fn, 128),
        Rounding(torch.int8),
    ):
        yield from time_w8a8(rounding, "8192 x 8192", 8192, 8192, (1, 16, 64, 256, 512, 2048, 8192))
        for name, (n, k) in linears.items():
            yield from time_w8a8(rounding, name, n, k, (1, 16, 256, 512, 2048))
