"""KV caches in host memory that engines of one host copy blocks out of: memory without a name,
which another process of the same user reaches through the descriptor of the process that owns it.

A mapping keeps the memory, so a copy goes on when the owner dies; whether its blocks are to be
believed is not decided here.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
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
    """Pieces of memory, each with a descriptor. They end with the process, or with the last one
    that maps them."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self.pieces: list[tuple[int, str, UInt8Array]] = []
        """Descriptor, name and bytes of each."""

    def bytes(self, size: int) -> UInt8Array:
        """uint8 [size], zeros."""
        name = f"headwater-kv-{self._token}-{len(self.pieces)}"
        memory = anonymous_memory(name, size)
        weakref.finalize(self, os.close, memory).atexit = False
        found: UInt8Array = np.frombuffer(map_at_least(memory, size), np.uint8)
        self.pieces.append((memory, name, found))
        return found


class SharedCopies:
    """See `DirectCopies`. Copies are made by a thread of their own, block by block."""

    def __init__(
        self,
        memory: SharedMemory,
        num_planes: Sequence[int],
        num_blocks: int,
        lane: Lane | None = None,
    ) -> None:
        """Each piece of the memory is a KV cache [planes, num_blocks, bytes of a block in a
        plane]."""
        self._caches = [
            found.reshape(planes, num_blocks, -1)
            for (_, _, found), planes in zip(memory.pieces, num_planes, strict=True)
        ]
        self._memory = memory
        self._lane = lane or ThreadLane("kv-direct")
        self.handle = _handle(memory, num_blocks)
        self.seconds_per_block = (
            sum(each[:, 0].size for each in self._caches) / ASSUMED_BYTES_PER_SECOND
        )

    def copy(self, handle: bytes, sources: Int32Array, targets: Int32Array) -> SharedCopy:
        """Maps the memory for as long as it is copied from: a mapping that stays would keep a dead
        engine's memory."""
        theirs = _opened(handle, self._caches)
        if max(sources.tolist(), default=0) >= theirs[0].shape[1]:
            raise OSError(
                f"block {max(sources.tolist())} is not in a KV cache of {theirs[0].shape[1]} blocks"
            )
        copy = SharedCopy(len(sources))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._lane.submit(partial(self._copy_block, copy, theirs, source, target))
        return copy

    def close(self, handle: bytes) -> None:
        """Does nothing: no cache is open between copies."""

    def _copy_block(
        self, copy: SharedCopy, theirs: list[UInt8Array], source: int, target: int
    ) -> None:
        for their_cache, cache in zip(theirs, self._caches, strict=True):
            np.copyto(cache[:, target], their_cache[:, source])
        copy.num_left -= 1


class SharedCopy:
    """See `DirectCopy`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_left = num_blocks
        """Counted down by the thread that copies."""

    @property
    def is_done(self) -> bool:
        return self.num_left == 0


def _handle(memory: SharedMemory, num_blocks: int) -> bytes:
    """Empty where descriptors of other processes cannot be opened."""
    if not is_shareable():
        return b""
    pieces = [[descriptor, name] for descriptor, name, _ in memory.pieces]
    return json.dumps(
        {"host": host_id(), "process": os.getpid(), "num_blocks": num_blocks, "pieces": pieces}
    ).encode()


def _opened(handle: bytes, like: Sequence[UInt8Array]) -> list[UInt8Array]:
    """The caches of another engine, whose blocks are as large as those of `like`. Raises
    `OSError`."""
    described: dict[str, Any] = json.loads(handle) if handle else {}
    if described.get("host") != host_id():
        raise OSError("the engine is on another host")
    caches = list[UInt8Array]()
    for (descriptor, name), own in zip(described["pieces"], like, strict=True):
        found = open_memory(described["process"], descriptor, name)
        try:
            size = own[:, 0].size * int(described["num_blocks"])
            mapped = mmap.mmap(found, size, prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(f"{name} has not {described['num_blocks']} blocks") from error
        finally:
            os.close(found)
        caches.append(
            np.frombuffer(mapped, np.uint8).reshape(len(own), described["num_blocks"], -1)
        )
    return caches
