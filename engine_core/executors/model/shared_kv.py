"""KV blocks in host memory that engines of one host copy blocks out of: memory without a name,
which another process of the same user reaches through the descriptor of the process that owns it.

A mapping keeps the memory, so a copy goes on when the owner dies; callers decide whether its blocks
are valid.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from functools import partial
from typing import Any

import numpy as np

from ...executor import Int32Array, UInt8Array
from ...system.lanes import Lane, ThreadLane
from ...system.process_memory import host_id, is_shareable, open_memory
from ...system.ring import anonymous_memory, map_at_least

ASSUMED_BYTES_PER_SECOND = 2e9
"""Speed of a copy before one was measured; steps use the same memory."""


class SharedMemory:
    """KV blocks in memory with a file descriptor. It is freed when the last process that maps it
    ends."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.name = f"headwater-kv-{secrets.token_hex(8)}"
        size = num_blocks * block_bytes
        self.descriptor = anonymous_memory(self.name, size)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        memory: UInt8Array = np.frombuffer(map_at_least(self.descriptor, size), np.uint8)
        self.blocks = memory.reshape(num_blocks, block_bytes)
        """Zeros at first."""


class SharedCopies:
    """See `DirectCopies`. Copies are made by a thread of their own, block by block."""

    def __init__(self, memory: SharedMemory, lane: Lane | None = None) -> None:
        self._memory = memory
        self._lane = lane or ThreadLane("kv-direct")
        self.handle = _handle(memory)
        self.seconds_per_block = memory.blocks.shape[1] / ASSUMED_BYTES_PER_SECOND

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> SharedCopy:
        """Maps the memory for as long as it is copied from: a mapping that stays would keep a dead
        engine's memory."""
        theirs = _opened(handle, self._memory.blocks.shape[1])
        if max(sources.tolist(), default=0) >= len(theirs):
            raise OSError(
                f"block {max(sources.tolist())} is not in a KV cache of {len(theirs)} blocks"
            )
        copy = SharedCopy(len(sources))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._lane.submit(partial(self._copy_block, copy, theirs, source, target))
        return copy

    def close(self, handle: bytes) -> None:
        """Does nothing: another engine's memory is mapped only while it is copied from."""

    def _copy_block(self, copy: SharedCopy, theirs: UInt8Array, source: int, target: int) -> None:
        self._memory.blocks[target] = theirs[source]
        copy.num_left -= 1


class SharedCopy:
    """See `DirectCopy`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_left = num_blocks
        """Counted down by the thread that copies."""

    @property
    def is_done(self) -> bool:
        return self.num_left == 0


def _handle(memory: SharedMemory) -> bytes:
    """Empty where descriptors of other processes cannot be opened."""
    if not is_shareable():
        return b""
    described = {
        "host": host_id(),
        "process": os.getpid(),
        "descriptor": memory.descriptor,
        "name": memory.name,
        "num_blocks": len(memory.blocks),
    }
    return json.dumps(described).encode()


def _opened(handle: bytes, block_bytes: int) -> UInt8Array:
    """The blocks of another engine, which have as many bytes as this one's. Raises `OSError`."""
    described: dict[str, Any] = json.loads(handle) if handle else {}
    if described.get("host") != host_id():
        raise OSError("the engine is on another host")
    name = described["name"]
    num_blocks = int(described["num_blocks"])
    found = open_memory(described["process"], described["descriptor"], name)
    try:
        mapped = mmap.mmap(found, num_blocks * block_bytes, prot=mmap.PROT_READ)
    except ValueError as error:
        raise OSError(f"{name} has not {num_blocks} blocks") from error
    finally:
        os.close(found)
    blocks: UInt8Array = np.frombuffer(mapped, np.uint8)
    return blocks.reshape(num_blocks, block_bytes)
