from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from headwater.engine_core.executors.model.new_cache import private_cache

SHAPE = (4, 2, 512, 4, 16, 64)
NUM_BYTES = 2 * 4 * 2 * 512 * 4 * 16 * 64


def taken_bytes(cache: torch.Tensor) -> int:
    """Bytes of the cache's pages that are in memory or swapped out. Other memory of this process
    does not count."""
    first = cache.data_ptr() // mmap.PAGESIZE
    end = -(-(cache.data_ptr() + cache.nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        words = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
    assert len(words) == end - first
    return mmap.PAGESIZE * int(np.count_nonzero(words >> np.uint64(62)))


def test_a_cache_on_a_cpu_is_zeroed_and_takes_memory_as_its_blocks_are_filled() -> None:
    cache = private_cache(SHAPE, torch.bfloat16, torch.device("cpu"))
    assert (cache.shape, cache.dtype) == (SHAPE, torch.bfloat16)
    assert taken_bytes(cache) < NUM_BYTES / 8
    cache[:, :, :256] = 1
    assert NUM_BYTES / 4 < taken_bytes(cache) < NUM_BYTES * 3 / 4
    assert cache[:, :, 256:].count_nonzero() == 0
    assert cache[:, :, :256].float().mean() == 1


def test_a_cache_of_no_layers_is_empty() -> None:
    assert private_cache((0, 2, 8), torch.float32, torch.device("cpu")).shape == (0, 2, 8)
