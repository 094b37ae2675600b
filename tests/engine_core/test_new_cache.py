from __future__ import annotations

from pathlib import Path

import torch

from headwater.engine_core.executors.new_cache import private_cache

SHAPE = (4, 2, 512, 4, 16, 64)
NUM_BYTES = 2 * 4 * 2 * 512 * 4 * 16 * 64


def resident_bytes() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Rss:"))


def test_a_cache_on_a_cpu_is_zeroed_and_takes_memory_as_its_blocks_are_filled() -> None:
    before = resident_bytes()
    cache = private_cache(SHAPE, torch.bfloat16, torch.device("cpu"))
    assert (cache.shape, cache.dtype) == (SHAPE, torch.bfloat16)
    assert resident_bytes() - before < NUM_BYTES / 8
    cache[:, :, :256] = 1
    assert NUM_BYTES / 4 < resident_bytes() - before < NUM_BYTES * 3 / 4
    assert cache[:, :, 256:].count_nonzero() == 0
    assert cache[:, :, :256].float().mean() == 1


def test_a_cache_of_no_layers_is_empty() -> None:
    assert private_cache((0, 2, 8), torch.float32, torch.device("cpu")).shape == (0, 2, 8)
