from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout

CPU = torch.device("cpu")
LAYOUT = KvLayout(4, 4, 64, torch.bfloat16)
NUM_BYTES = 2 * 4 * 2 * 512 * 4 * 16 * 64


def taken_bytes(memory: torch.Tensor) -> int:
    """Bytes of the memory's pages that are in memory or swapped out. Other memory of this process
    does not count."""
    first = memory.data_ptr() // mmap.PAGESIZE
    end = -(-(memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        words = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
    assert len(words) == end - first
    return mmap.PAGESIZE * int(np.count_nonzero(words >> np.uint64(62)))


def test_blocks_on_a_cpu_are_zeroed_and_take_memory_as_they_are_filled() -> None:
    blocks = KvBlocks.allocated([LAYOUT], 512, 16, CPU)
    (cache,) = blocks.kv_caches
    assert (cache.shape, cache.dtype) == ((4, 2, 512, 4, 16, 64), torch.bfloat16)
    assert blocks.memory.nbytes == NUM_BYTES
    assert taken_bytes(blocks.memory) < NUM_BYTES / 8
    cache[:, :, :256] = 1
    assert NUM_BYTES / 4 < taken_bytes(blocks.memory) < NUM_BYTES * 3 / 4
    assert cache[:, :, 256:].count_nonzero() == 0
    assert cache[:, :, :256].float().mean() == 1


def test_all_layers_of_a_block_lie_together_and_those_of_what_drafts_behind_them() -> None:
    draft = KvLayout(1, 1, 32, torch.float32)
    blocks = KvBlocks.allocated([LAYOUT, draft], 5, 16, CPU)
    for cache, number in zip(blocks.kv_caches, (1.0, 2.0), strict=True):
        cache[:, :, 3] = number
    served_bytes = 4 * 2 * 4 * 16 * 64 * 2
    assert blocks.sizes == [served_bytes, 2 * 16 * 32 * 4]
    written = blocks.memory[3]
    assert (written[:served_bytes].view(torch.bfloat16) == 1).all()
    assert (written[served_bytes:].view(torch.float32) == 2).all()
    assert not blocks.memory[[0, 1, 2, 4]].any()
