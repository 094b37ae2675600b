"""Slots of page-locked host memory, and copies between them and blocks on the GPU."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from headwater.kernels.blocks.copy_each import copy_each
from headwater.kernels.blocks.copy_rows import copy_rows

from ...config import ConfigError, require
from ...executor import Int32Array, UInt8Array
from ..device.locked_memory import LockedMemory, mapped
from .block_slice import BlockSlice

log = logging.getLogger(__name__)
PAGE_BYTES = 4096
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
TOUCHERS = 16
"""Threads that touch memory before it is locked: locking then takes a sixth of the time."""
LOCKABLE = "what the host lets a GPU lock in memory"


class LockedSlots(Protocol):
    """Copies are launched on torch's current stream, in any order. `words`: int32 [num_blocks,
    words that this process has of a block], contiguous, on the GPU; blocks [N] and slots [N] are
    pairs, each of them once."""

    bytes: UInt8Array
    """[slots, bytes of a block]"""

    def copy_out(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        """Copies blocks to slots."""

    def copy_in(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        """Copies slots to blocks."""

    def release(self) -> None:
        """Ends the lock. Nothing may be in flight that reads or writes the slots."""


class ProcessSlots:
    """See `LockedSlots`: slots of one process, which has whole blocks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """`shape`: slots, words of a block. Raises `ConfigError` where there is no such memory."""
        self._locked = _page_locked(shape)
        self._words = self._locked.memory
        self.bytes: UInt8Array = self._words.numpy().view(np.uint8)

    def copy_out(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        copy_each(words, self._words, blocks, slots)

    def copy_in(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        copy_each(self._words, words, slots, blocks)

    def release(self) -> None:
        self._locked.release()


class RankSlots:
    """See `LockedSlots`: the part of one rank in slots that all ranks of an engine have mapped.
    Each rank locks the whole mapping for its own GPU."""

    def __init__(self, slots: UInt8Array, part: BlockSlice) -> None:
        """slots [slots, bytes of a block], mapped. Raises `RuntimeError` where the host does not
        let it be locked."""
        self._locked = LockedMemory(torch.from_numpy(slots).view(torch.int32))
        self._rows = part.of(self._locked.memory)
        self.bytes = slots

    def copy_out(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        for rows, own in self._stretches(words, blocks, slots):
            copy_rows(own, rows)

    def copy_in(self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array) -> None:
        for rows, own in self._stretches(words, blocks, slots):
            copy_rows(rows, own)

    def release(self) -> None:
        self._locked.release()

    def _stretches(
        self, words: torch.Tensor, blocks: Int32Array, slots: Int32Array
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ranges of slots with a constant stride, each with its range of blocks. Ranges of
        neighbouring slots where the rank has all layers or all heads; else within one slot."""
        for own_run, run in runs(blocks, slots):
            rows = self._rows[run]
            own, (_, num_planes, num_words) = words[own_run].view(rows.shape), rows.shape
            if rows.stride(0) == num_planes * rows.stride(1):
                yield rows.flatten(0, 1), own.flatten(0, 1)
            elif rows.stride(1) == num_words:
                yield rows.flatten(1), own.flatten(1)
            else:
                yield from zip(rows, own, strict=True)


def runs(blocks: Int32Array, slots: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Ranges of consecutive blocks whose slots are consecutive too, each with these slots."""
    follows = (np.diff(blocks) == 1) & (np.diff(slots) == 1)
    bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), blocks.size]
    for start, end in pairwise(bounds):
        block, slot = int(blocks[start]), int(slots[start])
        yield slice(block, block + end - start), slice(slot, slot + end - start)


def check_room(num_bytes: int) -> None:
    """Whether the host may have so much memory for slots. Whoever takes more is killed without a
    word. Raises `ConfigError`."""
    limits = {
        "the limit of this container": _container_limit(),
        "the memory of this host": _host_memory(),
    }
    for name, most in limits.items():
        require(num_bytes <= most, "kv_swap_memory", num_bytes, f"at most {most} bytes, {name}")


def touch(memory: torch.Tensor, index: int = 0, size: int = 1) -> None:
    """Touches the pages of zeroed int32 memory, so that the host allocates them; of `size`
    processes that share it, number `index` touches its share."""
    pages = np.array_split(memory.view(-1).numpy()[:: PAGE_BYTES // 4], size)[index]
    with ThreadPoolExecutor(TOUCHERS) as threads:
        list(threads.map(lambda some: some.fill(0), np.array_split(pages, TOUCHERS)))


def _container_limit() -> float:
    """Bytes that a container's processes may have."""
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.exists() else ""
    return int(limit) if limit.isdigit() else math.inf


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _page_locked(shape: tuple[int, int]) -> LockedMemory:
    """int32 in host memory that copies reach without waiting. Of this size exactly: what torch
    allocates of such memory is a power of two. Raises `ConfigError`."""
    num_bytes = 4 * math.prod(shape)
    check_room(num_bytes)
    log.info("kv cache in host memory: locking %.1f GB", num_bytes / 1e9)
    try:
        memory = mapped(shape)
    except OSError:
        raise ConfigError("kv_swap_memory", num_bytes, "what the host has free") from None
    touch(memory)
    try:
        return LockedMemory(memory)
    except RuntimeError:
        raise ConfigError("kv_swap_memory", num_bytes, LOCKABLE) from None
