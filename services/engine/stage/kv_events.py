"""The server's own account of what the core caches: batches of events for others, a mirror for
snapshots.

The step thread is never asked. Knows nothing about how batches travel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from headwater.engine_core.step_output import CacheEvents, StoredChain
from headwater.proto.events_pb2 import Incarnation, KvEventBatch, StoredBlocks

FLUSH_SECONDS = 0.01
"""Events of so long travel together; an idle engine flushes too."""
ROUTINE_FLUSH_SECONDS = 0.05
"""Like `FLUSH_SECONDS`, for blocks of answers that go on: the next turn, which finds them, comes
when the answer has ended."""
_MAX_BATCH_HASHES = 8192
"""Enough for one flush. A batch has fewer than twice as many, which keeps it below the limits of
frames and of the bus."""
_MAX_KEPT_HASHES = 1 << 18
"""Largest number of hashes in the batches that can be replayed."""


class CacheMirror:
    """The set of cached hashes and its checksum."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.xor = 0

    def apply(self, events: CacheEvents) -> None:
        if events.cleared:
            self.hashes.clear()
            self.xor = 0
        for block_hash in events.removed:
            if block_hash in self.hashes:
                self.hashes.remove(block_hash)
                self.xor ^= checksum_of(block_hash)
        for chain in events.stored:
            for block_hash in chain.hashes:
                if block_hash not in self.hashes:
                    self.hashes.add(block_hash)
                    self.xor ^= checksum_of(block_hash)


class KvEventLog:
    """Numbers the batches, keeps recent ones for replay and hands each to `publish` as it is
    closed."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.seq = 0
        self.publish: Callable[[KvEventBatch], None] = _unheard
        self._incarnation = incarnation
        self._mirror = CacheMirror()
        self._open = CacheEvents()
        self._open_stored: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._kept: deque[KvEventBatch] = deque()
        self._num_kept_hashes = 0

    def open(self, publish: Callable[[KvEventBatch], None]) -> None:
        """Passes every batch to `publish` from now on, and at once those so far: what an engine
        found on its disk before it joined the cluster is reported nowhere else."""
        self.flush()
        self.publish = publish
        for batch in self._kept:
            publish(batch)

    def note(self, events: CacheEvents, *, is_routine: bool = False) -> None:
        """Events join the open batch where its order (cleared, removed, stored) says the same as
        theirs did. More of them than a batch has room for, as when a disk is lost, become
        several. `is_routine`: they are of a step in which answers only got longer."""
        for part in _parts_of(events):
            self._join(part)
        self.flush_soon(ROUTINE_FLUSH_SECONDS if is_routine else FLUSH_SECONDS)

    def flush_soon(self, seconds: float = FLUSH_SECONDS) -> None:
        """Closes the open batch within this time, if anything is in it."""
        if not self._has_open_events:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None and self._timer.when() > loop.time() + seconds:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_later(seconds, self.flush)

    @property
    def _has_open_events(self) -> bool:
        events = self._open
        return bool(events.cleared or events.removed or events.stored)

    def _join(self, events: CacheEvents) -> None:
        if events.cleared or not self._open_stored.isdisjoint(events.removed):
            self.flush()
        self._mirror.apply(events)
        self._open.cleared |= events.cleared
        self._open.removed += events.removed
        self._open.stored += events.stored
        for chain in events.stored:
            self._open_stored.update(chain.hashes)
        if len(self._open_stored) + len(self._open.removed) >= _MAX_BATCH_HASHES:
            self.flush()

    def flush(self) -> None:
        """Closes the open batch, if anything is in it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._has_open_events:
            return
        events = self._open
        self._open = CacheEvents()
        self._open_stored = set()
        self.seq += 1
        batch = KvEventBatch(
            incarnation=self._incarnation,
            seq=self.seq,
            stored=[_blocks_of(chain) for chain in events.stored],
            removed=events.removed,
            cleared=events.cleared,
            index_count=len(self._mirror.hashes),
            index_xor=self._mirror.xor,
        )
        self._keep(batch)
        self.publish(batch)

    def snapshot(self) -> tuple[int, list[bytes]]:
        """Cached hashes, and the number of the batch after which they are valid."""
        self.flush()
        return self.seq, list(self._mirror.hashes)

    def since(self, seq: int) -> list[KvEventBatch] | None:
        """The batches after `seq`; None when some of them are no longer kept, or `seq` is not yet
        reached."""
        self.flush()
        first_kept = self._kept[0].seq if self._kept else self.seq + 1
        if not first_kept - 1 <= seq <= self.seq:
            return None
        return [batch for batch in self._kept if batch.seq > seq]

    def _keep(self, batch: KvEventBatch) -> None:
        """Keeps all batches until `open`, then the recent ones."""
        self._kept.append(batch)
        self._num_kept_hashes += num_hashes(batch)
        while (
            self._num_kept_hashes > _MAX_KEPT_HASHES
            and len(self._kept) > 1
            and self.publish is not _unheard
        ):
            self._num_kept_hashes -= num_hashes(self._kept.popleft())


def checksum_of(block_hash: bytes) -> int:
    """A block's term in `index_xor`: the first 64 bits of its hash."""
    return int.from_bytes(block_hash[:8], "little")


def num_hashes(batch: KvEventBatch) -> int:
    return len(batch.removed) + sum(len(chain.block_hashes) for chain in batch.stored)


def _parts_of(events: CacheEvents) -> Iterator[CacheEvents]:
    """The same events in their order, at most `_MAX_BATCH_HASHES` blocks at a time."""
    if len(events.removed) + sum(len(chain.hashes) for chain in events.stored) <= _MAX_BATCH_HASHES:
        yield events
        return
    yield CacheEvents(cleared=events.cleared)
    for start in range(0, len(events.removed), _MAX_BATCH_HASHES):
        yield CacheEvents(removed=events.removed[start : start + _MAX_BATCH_HASHES])
    for chain in events.stored:
        parents = [chain.parent, *chain.hashes]
        for start in range(0, len(chain.hashes), _MAX_BATCH_HASHES):
            part = StoredChain(
                parent=parents[start], hashes=chain.hashes[start : start + _MAX_BATCH_HASHES]
            )
            yield CacheEvents(stored=[part])


def _blocks_of(chain: StoredChain) -> StoredBlocks:
    return StoredBlocks(parent_hash=chain.parent, block_hashes=chain.hashes)


def _unheard(batch: KvEventBatch) -> None:
    pass
