"""Reads and writes of the files of KV blocks, in threads beside the step loop, which applies their
results. An error of the disk ends its use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from ...executor import UInt8Array
from ...system.lanes import Lane
from ..block_record import BlockId
from ..block_source import Owner
from .block_files import BlockFiles, is_disk_full

NoteFound = Callable[[Sequence[BlockId], float | None], None]


class DiskJobs:
    def __init__(
        self,
        files: BlockFiles,
        slots: UInt8Array,
        writes: Lane,
        reads: Lane,
        on_failed: Callable[[], None],
    ) -> None:
        """slots [slots, bytes of a block]. `writes` runs one job after another. `on_failed` is
        called once, in the step loop, when the disk is not used any more."""
        self._files = files
        self._slots = slots
        self.writes = writes
        self.reads = reads
        self._on_failed = on_failed
        self._results: deque[Callable[[], None]] = deque()
        """Results of jobs, which the step loop applies."""
        self.failure = ""
        """Why the disk is not used any more; empty: it is."""

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def apply_results(self) -> None:
        while self._results:
            self._results.popleft()()

    def scan(self, note: NoteFound) -> None:
        """`note` gets the blocks of an earlier life, the newest last, and seconds in which one is
        read; None: the disk has failed."""
        self.writes.submit(partial(self._scan, note))

    def write(
        self,
        owner: Owner,
        block_hash: bytes,
        parent: bytes,
        slot: int,
        note: Callable[[bool], None],
    ) -> None:
        """`note` gets whether the block is written."""
        self.writes.submit(partial(self._write, owner, block_hash, parent, slot, note))

    def read(
        self,
        namespaces: Sequence[bytes | None],
        hashes: Sequence[bytes],
        slots: Sequence[int],
        note: Callable[[int], None],
    ) -> None:
        """`note` gets how many leading blocks were read; a block without a namespace is not
        held."""
        self.reads.submit(partial(self._read, namespaces, hashes, slots, note))

    def read_lent(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        """Reads a block, in the caller's thread. Returns whether it did."""
        with self._ends_use("read"):
            return not self.failure and self._files.read(namespace, block_hash, into)
        return False

    def drop(self, namespace: bytes, block_hash: bytes) -> None:
        self.writes.submit(partial(self._drop, namespace, block_hash))

    def touch(self, namespace_of: Mapping[bytes, bytes]) -> None:
        """Notes in files, in this order, that their blocks were used."""
        self.writes.submit(partial(self._touch, namespace_of))

    def close(self) -> None:
        """A file that is being written is completed, or deleted at the next start."""
        self._files.close()

    def _scan(self, note: NoteFound) -> None:
        found: list[BlockId] = []
        seconds = None
        with self._ends_use("read"):
            every = list(self._files.scan())
            most = self._files.num_blocks(self._slots.shape[1])
            num_too_many = max(len(every) - most, 0)
            # Deletes before it writes: fewer files may be allowed now because the disk is full.
            for block in every[:num_too_many]:
                self._files.drop(block.namespace, block.block_hash)
            seconds = self._files.measure(self._slots.shape[1])
            found = every[num_too_many:]
        self._results.append(partial(note, found, seconds))

    def _write(
        self,
        owner: Owner,
        block_hash: bytes,
        parent: bytes,
        slot: int,
        note: Callable[[bool], None],
    ) -> None:
        is_written = False
        with self._ends_use("written to"):
            if not self.failure:
                payload = memoryview(self._slots[slot])
                is_written = self._files.write(owner, block_hash, parent, payload)
        self._results.append(partial(note, is_written))

    def _read(
        self,
        namespaces: Sequence[bytes | None],
        hashes: Sequence[bytes],
        slots: Sequence[int],
        note: Callable[[int], None],
    ) -> None:
        num_read = 0
        with self._ends_use("read"):
            for namespace, block_hash, slot in zip(namespaces, hashes, slots, strict=True):
                into = memoryview(self._slots[slot])
                if (
                    self.failure
                    or namespace is None
                    or not self._files.read(namespace, block_hash, into)
                ):
                    break
                num_read += 1
        self._results.append(partial(note, num_read))

    def _drop(self, namespace: bytes, block_hash: bytes) -> None:
        with self._ends_use("written to"):
            self._files.drop(namespace, block_hash)

    def _touch(self, namespace_of: Mapping[bytes, bytes]) -> None:
        with self._ends_use("written to"):
            for block_hash, namespace in namespace_of.items():
                self._files.touch(namespace, block_hash)

    def _note_failed(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._on_failed()

    @contextmanager
    def _ends_use(self, done: str) -> Iterator[None]:
        """Context of disk reads and writes; an error ends the use of the disk."""
        try:
            yield
        except OSError as error:
            what = "it is full" if is_disk_full(error) else f"it cannot be {done}"
            self._results.append(partial(self._note_failed, f"{what} ({error})"))
