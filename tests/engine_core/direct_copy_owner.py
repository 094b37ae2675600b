"""A process that owns a KV cache which others copy from: `python -m
tests.engine_core.direct_copy_owner cpu|cuda SEED` prints the handle and waits until its standard
input ends."""

from __future__ import annotations

import sys

import torch

from headwater.engine_core.executor import DirectCopies
from headwater.engine_core.executors.model.kv_blocks import KvBlocks
from headwater.engine_core.executors.model.shared_kv import SharedCopies, SharedMemory
from tests.engine_core.made_blocks import blocks_of, filled, layout_of

SHAPES = ((3, 2, 12, 2, 16, 64), (1, 2, 12, 1, 16, 64))
"""Shapes of the KV caches: that of a model, and that of its draft model."""


def contents(seed: int, num_blocks: int = 12) -> list[torch.Tensor]:
    """bfloat16 [layers, 2, num_blocks, Hk, block_size, D] each, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(layers, two, num_blocks, *rest, generator=generator).bfloat16()
        for layers, two, _, *rest in SHAPES
    ]


def shared(caches: list[torch.Tensor], device: torch.device) -> tuple[KvBlocks, DirectCopies]:
    """Blocks on a device with these keys and values, and what copies into them."""
    if device.type == "cpu":
        layouts = [layout_of(each) for each in caches]
        num_blocks, block_size = caches[0].shape[2], caches[0].shape[4]
        block_bytes = sum(each.block_bytes(block_size) for each in layouts)
        memory = SharedMemory(num_blocks, block_bytes)
        blocks = KvBlocks(layouts, block_size, torch.from_numpy(memory.blocks))
        return filled(blocks, caches), SharedCopies(memory)
    from headwater.engine_core.executors.tiers.cuda_direct_copies import CudaDirectCopies  # noqa: PLC0415

    blocks = blocks_of(*(each.to(device) for each in caches))
    return blocks, CudaDirectCopies(blocks.words, lambda stream, blocks: None)


def main() -> None:
    device = torch.device(sys.argv[1])
    seed = int(sys.argv[2])
    if device.type == "cuda":
        # The last of the GPUs that this process sees.
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
    _blocks, copies = shared(contents(seed), device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(copies.handle.decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
