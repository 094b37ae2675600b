"""A process that owns a KV cache which others copy from: `python -m
tests.engine_core.direct_copy_owner cpu|cuda SEED` prints the handle and waits until its standard
input ends."""

from __future__ import annotations

import sys

import torch

from headwater.engine_core.executors.model.new_cache import cache_in
from headwater.engine_core.executors.model.shared_kv import SharedMemory
from headwater.engine_core.executors.tiers.memory_swapper import MemorySwapper
from headwater.kernels.blocks.copy_blocks import as_planes

SHAPES = ((3, 2, 12, 2, 16, 64), (1, 2, 12, 1, 16, 64))
"""Shapes of the KV caches: that of a model, and that of its draft model."""


def contents(seed: int, num_blocks: int = 12) -> list[torch.Tensor]:
    """bfloat16 [layers, 2, num_blocks, Hk, block_size, D] each, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(layers, two, num_blocks, *rest, generator=generator).bfloat16()
        for layers, two, _, *rest in SHAPES
    ]


def main() -> None:
    device = sys.argv[1]
    seed = int(sys.argv[2])
    caches = contents(seed)
    if device == "cpu":
        memory = SharedMemory()
        shared = [cache_in(memory)(each.shape, each.dtype, each.device) for each in caches]
        for mine, each in zip(shared, caches, strict=True):
            mine.copy_(each)
        copies = MemorySwapper.of(shared, 1, memory).direct_copies
    else:
        from headwater.engine_core.executors.tiers.cuda_direct_copies import CudaDirectCopies  # noqa: PLC0415

        # The last of the GPUs that this process sees.
        number = torch.cuda.device_count() - 1
        torch.cuda.set_device(number)
        planes = [as_planes(each.to(f"cuda:{number}")) for each in caches]
        copies = CudaDirectCopies(planes, lambda stream, blocks: None)
        torch.cuda.synchronize()
    assert copies is not None
    print(copies.handle.decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
