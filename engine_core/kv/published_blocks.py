"""The contents of an engine's KV cache, published in memory that the other engines of its host
read: for each block its generation (how often it was handed out) and the hash of its tokens.

A reader needs no answer from the owner. It reads hashes and generations, copies blocks, and reads
the generations once more: a copied block counts only if it was not handed out in between, as in a
seqlock. Knows hashes and blocks; knows nothing about leases or copies.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import weakref
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..executor import Int32Array
from ..system.process_memory import host_id, is_shareable, open_memory
from ..system.ring import anonymous_memory, map_at_least
from .block_pool import NULL_BLOCK, BlockPool, CachedBlock
from .lending import Steps

BoolArray = npt.NDArray[np.bool_]
UInt64Array = npt.NDArray[np.uint64]
TOKEN_LEN = 16
HEADER_LEN = 64
HASH_LEN = 16
ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
"""Processors on which other cores see stores in the order in which they were made, and loads are
made in order. The protocol needs that: Python has no barriers. Elsewhere nothing is published, and
owners are asked."""


class PublishedBlocks:
    """The owner's end. The pool counts generations in the shared memory itself, so that a block is
    out of date for readers before anything new is written to it; `advance` publishes hashes of
    blocks once they are computed."""

    def __init__(self, pool: BlockPool, steps: Steps) -> None:
        self._pool = pool
        self._steps = steps
        self._token = secrets.token_bytes(TOKEN_LEN)
        self._name = f"headwater-published-{self._token.hex()}"
        num_blocks = len(pool.generations)
        self._descriptor = anonymous_memory(self._name, _num_bytes(num_blocks))
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        mapped = map_at_least(self._descriptor, _num_bytes(num_blocks))
        generations, stamps, self._hashes = _memory(mapped, num_blocks)
        self._stamps = stamps.cast("Q")
        pool.publish(generations.cast("Q"))
        self._computing = deque[tuple[int, list[CachedBlock]]]()
        """Blocks that were cached, by the last step that may compute them."""
        mapped[:TOKEN_LEN] = self._token
        self.handle = json.dumps(
            {
                "host": host_id(),
                "process": os.getpid(),
                "descriptor": self._descriptor,
                "name": self._name,
                "token": self._token.hex(),
                "num_blocks": num_blocks,
            }
        ).encode()
        """Bytes from which another process opens a `BlocksView`."""

    @classmethod
    def of(cls, pool: BlockPool, steps: Steps) -> PublishedBlocks | None:
        """Blocks of a pool that others can read from shared memory; None on systems and processors
        where that does not work."""
        return (
            cls(pool, steps) if is_shareable() and platform.machine() in ORDERED_MACHINES else None
        )

    def advance(self, retired_step: int) -> None:
        """Publishes the hashes of blocks that are computed now; steps up to `retired_step` have
        ended. To be called after each step."""
        if cached := self._pool.take_cached():
            self._computing.append((self._steps.youngest, cached))
        while self._computing and self._computing[0][0] <= retired_step:
            self._publish(self._computing.popleft()[1])

    def _publish(self, cached: list[CachedBlock]) -> None:
        # A step has few blocks: writing them one by one is faster than building arrays.
        generations = self._pool.generations
        hashes = self._hashes
        stamps = self._stamps
        for block, block_hash, number in cached:
            if generations[block] == number:
                start = HASH_LEN * block
                hashes[start : start + HASH_LEN] = _published(block_hash)
                # The last: a reader that sees the stamp sees the hash.
                stamps[block] = number


class Found(NamedTuple):
    """Blocks of another engine that match wanted hashes."""

    blocks: Int32Array
    """[N], of the leading hashes."""
    generations: UInt64Array
    """[N]"""


class BlocksView:
    """The reader's side, which maps what another engine publishes."""

    def __init__(self, handle: bytes) -> None:
        """Raises `OSError` where the memory cannot be opened, or is not that of the incarnation
        that made the handle."""
        described: dict[str, Any] = json.loads(handle) if handle else {}
        if described.get("host") != host_id():
            raise OSError("the engine publishes nothing on this host")
        num_blocks = int(described["num_blocks"])
        name = described["name"]
        found = open_memory(described["process"], described["descriptor"], name)
        try:
            mapped = mmap.mmap(found, _num_bytes(num_blocks), prot=mmap.PROT_READ)
        except ValueError as error:
            raise OSError(f"{name} has not {num_blocks} blocks") from error
        finally:
            os.close(found)
        # Between the look at the name and the opening, the process and its successor may have
        # changed places.
        if not _is_of(mapped, bytes.fromhex(described["token"])):
            raise OSError(f"{name} is of another incarnation")
        self._generations, self._stamps, self._hashes = _columns(mapped, num_blocks)

    def find(self, hashes: Sequence[bytes]) -> Found:
        """Blocks of the leading hashes that are computed and cached now. They may be handed out at
        any time: see `num_unchanged`."""
        # The stamps first: a hash that is read later is of the stamp's generation, or of a younger
        # one, which the comparison of generations finds out.
        stamps = self._read(self._stamps)
        words = self._read(self._hashes)
        current = np.flatnonzero((stamps == self._generations) & (stamps > 0))
        wanted = _words(hashes)
        candidates = current[_may_be_among(words[current, 0], wanted[:, 0])]
        found = _leading(wanted, words[candidates], candidates)
        return Found(found, stamps[found])

    def num_unchanged(self, found: Found) -> int:
        """Leading blocks that were not handed out again since they were found. To be asked when
        whatever read them has ended."""
        changed = np.flatnonzero(self._generations[found.blocks] != found.generations)
        return int(changed[0]) if changed.size else len(found.blocks)

    def _read(self, column: UInt64Array) -> UInt64Array:
        """A copy of the column; the owner goes on writing."""
        return column.copy()


def _is_of(mapped: mmap.mmap, token: bytes) -> bool:
    """Whether memory is that of the incarnation with the token."""
    return mapped[:TOKEN_LEN] == token


def _num_bytes(num_blocks: int) -> int:
    return HEADER_LEN + num_blocks * (8 + 8 + HASH_LEN)


def _columns(mapped: mmap.mmap, num_blocks: int) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Generations [blocks]; the generation that each hash belongs to [blocks], 0: none; hashes
    [blocks, 2]."""
    generations, stamps, hashes = (
        np.frombuffer(each, np.uint64) for each in _memory(mapped, num_blocks)
    )
    return generations, stamps, hashes.reshape(-1, 2)


def _memory(
    mapped: mmap.mmap, num_blocks: int
) -> tuple[memoryview[int], memoryview[int], memoryview[int]]:
    """The bytes of the columns, in their order."""
    whole = memoryview(mapped)
    end = _num_bytes(num_blocks)
    stamps = HEADER_LEN + 8 * num_blocks
    hashes = HEADER_LEN + 16 * num_blocks
    return whole[HEADER_LEN:stamps], whole[stamps:hashes], whole[hashes:end]


def _words(hashes: Sequence[bytes]) -> UInt64Array:
    """uint64 [N, 2]"""
    return np.frombuffer(b"".join(map(_published, hashes)), np.uint64).reshape(-1, 2)


def _published(key: bytes) -> bytes:
    """Fixed-size digest of a block's hash, or of the longer key of another page of it."""
    return key if len(key) == HASH_LEN else blake2b(key, digest_size=HASH_LEN).digest()


def _leading(wanted: UInt64Array, words: UInt64Array, blocks: npt.NDArray[np.intp]) -> Int32Array:
    """Blocks [N] of the leading hashes that blocks with the hashes `words` [blocks, 2] have;
    `wanted` is uint64 [hashes, 2]. Hashes that begin with the same word count as one, of which only
    the first is found."""
    order = np.argsort(wanted[:, 0])
    place = np.searchsorted(wanted[order, 0], words[:, 0])
    place[place == len(order)] = 0
    hashes = order[place]
    is_same = (wanted[hashes] == words).all(axis=1)
    found = np.full(len(wanted), NULL_BLOCK, np.int32)
    found[hashes[is_same]] = blocks[is_same]
    missed = np.flatnonzero(found == NULL_BLOCK)
    return found[: missed[0]] if missed.size else found


def _may_be_among(words: UInt64Array, wanted: UInt64Array) -> BoolArray:
    """Whether a word can be one of the wanted ones, by 16 of its bits: a filter that excludes
    nearly all others without a search."""
    marks: BoolArray = np.zeros(1 << 16, np.bool_)
    marks[wanted & 0xFFFF] = True
    is_marked: BoolArray = marks[words & 0xFFFF]
    return is_marked
