"""Makes KV caches: of this process alone, or in memory that others copy from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

from .shared_kv import SharedMemory

NewCache = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""Makes a KV cache of a shape, zeroed."""


def private_cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """See `NewCache`: one that no other process reaches. On a CPU the system makes its pages as
    blocks are filled, as those of `cache_in`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes:
        # To zero 512 MiB at the start takes a quarter of a second of a core; a page takes 2 µs
        # (2026-11-27).
        memory = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)
    return torch.zeros(*shape, dtype=dtype, device=device)


def cache_in(memory: SharedMemory) -> NewCache:
    """Makes caches on the CPU, in pieces of the memory."""
    return partial(_shared_cache, memory)


def _shared_cache(
    memory: SharedMemory, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    assert device.type == "cpu", device
    return (
        torch.from_numpy(memory.bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(*shape)
    )
