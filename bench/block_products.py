"""Times products with weights in GGUF's block formats on a GPU beside those of four bits in groups
and those with the expanded matrix, and compares their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from headwater.kernels.gemm.block_gemm import block_gemm, block_linear, expanded
from headwater.kernels.gemm.gemm import linear
from headwater.kernels.gemm.int4_gemm import TILES, int4_linear
from headwater.kernels.quant.block_formats import FORMATS, BlockFormat
from headwater.kernels.quant.block_planes import BlockPlanes, plane_shapes

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, copies_for, randn, timed
from .int4_products import random_int4


def random_planes(format: BlockFormat, n: int, k: int) -> BlockPlanes:
    """A weight of random numbers with small scales."""
    made = {}
    for name, (shape, dtype) in plane_shapes(format, n, k).items():
        if name == "scales":
            made[name] = (torch.rand(shape, device="cuda") * 0.01).half()
        else:
            num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
            made[name] = (
                torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
                .view(dtype)
                .view(shape)
            )
    return BlockPlanes(
        format=format,
        words=made["words"],
        high=made.get("high"),
        scales=made["scales"],
        factors=made.get("factors"),
    )


def time_blocks(name: str, n: int, k: int, batch_sizes: tuple[int, ...]) -> Iterator[Figure]:
    """Times each format beside four bits in groups of 128 and 32 inputs, in turn."""
    groups = {
        size: [random_int4(n, k, size) for _ in range(copies_for(n * k // 2))] for size in (128, 32)
    }
    for format in FORMATS.values():
        first = random_planes(format, n, k)
        weights = [
            first,
            *(random_planes(format, n, k) for _ in range(copies_for(first.num_bytes) - 1)),
        ]
        matrix = expanded([first], torch.bfloat16)
        for m in batch_sizes:
            x = randn(m, k)
            same = torch.equal(block_linear(x, [first]), linear(x, matrix, is_own=True))
            ours = timed([partial(block_linear, x, [weight], dependent=True) for weight in weights])
            others = {
                f"int4, groups of {size}": timed(
                    [partial(int4_linear, x, each, dependent=True) for each in of_size]
                )
                for size, of_size in groups.items()
            }
            tiles = next((tiles for most, tiles in TILES.items() if m <= most), None)
            if tiles is not None:
                out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
                calls = [
                    partial(block_gemm, x, weight, out, tiles, dependent=True) for weight in weights
                ]
                others["any GPU's kernel"] = timed(calls)
            limit = max(
                (first.num_bytes + 2 * m * (n + k)) / BYTES_PER_US, 2 * m * n * k / FLOPS_PER_US
            )
            note = (
                f"{'same bits' if same else 'OTHER BITS'}; "
                f"{ours / others['int4, groups of 128']:.2f} of int4; "
            )
            yield Figure(f"GGUF {format.name}", f"{name} M={m}", ours, limit, note + _list(others))


def _list(others: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {us:.1f}" for what, us in others.items())


def block_products(linears: Mapping[str, tuple[int, int]]) -> Iterator[Figure]:
    """Times a square matrix, then [N, K] of the given names, those of Qwen3-8B."""
    yield from time_blocks("8192 x 8192", 8192, 8192, (1, 16, 64, 256))
    for name, (n, k) in linears.items():
        yield from time_blocks(name, n, k, (1,))
