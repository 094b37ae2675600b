"""The block source on a disk: more room than in memory, and there again after a restart.

A block is copied to a slot of host memory when no request uses it any more, and written from there;
the least recently used goes first. Threads write and read, so that no step waits. When the disk
fails or is full this source gives up: it has nothing from then on, and says why. Knows hashes,
blocks and slots; knows nothing about requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..executor import Swapper, SwapPlan
from ..step_output import DiskUse
from ..system.lanes import Lane, ThreadLane
from .block_files import BlockFiles, is_disk_full
from .block_record import BlockId
from .block_source import LoadEnd, OnGained, OnLost, Owner, Ticket
from .lending import Read
from .prefix_hash import num_leading
from .read_costs import ReadCosts
from .staged_loads import Part, StagedLoads

log = logging.getLogger(__name__)
NUM_READERS = 3
MOST_FOUND = 256
"""Blocks of an earlier life that one poll takes in."""
TOUCH_SECONDS = 60.0
"""Time between two notes in files of when their blocks were used. Most blocks are used often, on
the device."""


@dataclass(slots=True, eq=False)
class _Save:
    """A block on its way to the disk."""

    owner: Owner
    block_hash: bytes
    parent: bytes
    slot: int


class DiskBlocks:
    """See `BlockSource` and `Lender`."""

    tier = "disk"
    keeps_blocks = True
    spares_steps = False

    def __init__(
        self,
        swapper: Swapper,
        files: BlockFiles,
        *,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        writes: Lane | None = None,
        reads: Lane | None = None,
    ) -> None:
        """`swapper` has the slots through which blocks pass. `writes` runs one job after
        another."""
        self._swapper = swapper
        self._files = files
        self._block_size = block_size
        self._block_bytes = swapper.slots.shape[1]
        self._file_bytes = files.file_bytes(self._block_bytes)
        self._writes = writes or ThreadLane("kv-write")
        self._reads = reads or ThreadLane("kv-read", NUM_READERS)
        self._namespace_of: OrderedDict[bytes, bytes] = OrderedDict()
        """By hash, in order of use: what `held` is."""
        self._used: dict[bytes, None] = {}
        """Hashes whose files have yet to say that they were used, in order of use."""
        self._touch_at = 0.0
        self._saving: dict[bytes, _Save] = {}
        self._leaving: deque[_Save] = deque()
        """Blocks that are being copied to their slots, in the swapper's order."""
        self._asked: list[tuple[_Save, int]] = []
        """Saves since the last launch, each with its KV block."""
        self._num_copied = self._num_writing = 0
        self._free_slots = deque(range(len(swapper.slots)))
        self._num_save_slots = max(1, len(swapper.slots) // 2)
        """Slots that saves may have: loads find the others free."""
        self._loads = StagedLoads(swapper, self._free_slots, self._read)
        self._reading = Counter[bytes]()
        """Loads and leases that read a hash, whose file stays."""
        self._results: deque[Callable[[], None]] = deque()
        """Results of jobs, which the step loop applies."""
        self._found: deque[BlockId] = deque()
        self._is_scanning = True
        self._num_written = self._num_read = self._num_damaged = 0
        self._failure = ""
        self._clock = clock
        self._costs = ReadCosts(clock)
        self._on_lost: OnLost = lambda _: None
        self._on_gained: OnGained = lambda parent, block_hash: None
        self._writes.submit(self._scan_files)

    @property
    def use(self) -> DiskUse:
        return DiskUse(
            num_blocks=len(self._namespace_of),
            num_bytes=self._num_used_bytes,
            max_bytes=self._files.max_bytes,
            num_written=self._num_written * self._block_size,
            num_read=self._num_read * self._block_size,
            num_damaged=self._num_damaged,
            failure=self._failure,
        )

    @property
    def held(self) -> Collection[bytes]:
        return self._namespace_of.keys()

    @property
    def has_background_work(self) -> bool:
        return bool(self._is_scanning or self._found or self._saving or self._results)

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        self._on_lost = on_lost
        self._on_gained = on_gained

    def find(self, hashes: Sequence[bytes]) -> int:
        return num_leading(hashes, self._namespace_of)

    def cost(self, num_blocks: int) -> float:
        """By the time that loads took lately; blocks that others wait for come first."""
        blocks = self._loads.num_waiting_blocks + num_blocks
        return blocks * (self._costs.seconds_per_block + self._swapper.seconds_per_block)

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = Ticket(hashes, blocks)
        self._reading.update(hashes)
        self._loads.load(ticket)
        self._costs.begin(ticket)
        return ticket

    def save(
        self, hashes: Sequence[bytes], blocks: Sequence[int], parents: Sequence[bytes], owner: Owner
    ) -> None:
        if self._failure:
            return
        known = {block_hash: None for block_hash in hashes if block_hash in self._namespace_of}
        self._touch(list(known))
        fresh = []
        for block_hash, block, parent in zip(hashes, blocks, parents, strict=True):
            if block_hash in self._namespace_of or block_hash in self._saving:
                continue
            # Where slots or bytes are too few, the first blocks are worth most.
            if (
                len(self._saving) >= self._num_save_slots
                or not self._free_slots
                or not self._make_room(known)
            ):
                break
            save = _Save(owner, block_hash, parent, self._free_slots.popleft())
            self._saving[block_hash] = save
            fresh.append((save, block))
        # The block written last is kept longest.
        self._asked += reversed(fresh)

    def launch(self) -> None:
        if self._asked:
            pairs = np.array([(block, save.slot) for save, block in self._asked], np.int32)
            self._leaving += (save for save, _ in self._asked)
            self._asked.clear()
            self._swapper.swap(
                SwapPlan(out_blocks=pairs[:, 0].copy(), out_slots=pairs[:, 1].copy())
            )
        self._loads.launch()

    def cancel(self, ticket: Ticket) -> None:
        self._loads.cancel(ticket)

    def poll(self) -> list[LoadEnd]:
        while self._results:
            self._results.popleft()()
        self._write_copied()
        self._take_found()
        if self._used and self._clock() >= self._touch_at:
            self._touch_used()
        # Where copies do not take long, what was just read is there at once.
        self._loads.launch()
        ends = self._loads.poll()
        for end in ends:
            self._settle(end)
        return ends

    def close(self) -> None:
        """A file that is being written is whole, or is deleted at the next start."""
        self._files.close()

    @property
    def _num_used_bytes(self) -> int:
        return (len(self._namespace_of) + len(self._saving)) * self._file_bytes

    def hold(self, hashes: Sequence[bytes]) -> list[Read]:
        held = hashes[: self.find(hashes)]
        self._reading.update(held)
        return [
            partial(self._read_lent, self._namespace_of[block_hash], block_hash)
            for block_hash in held
        ]

    def let_go(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._reading[block_hash] -= 1
            if not self._reading[block_hash]:
                del self._reading[block_hash]

    def _settle(self, end: LoadEnd) -> None:
        self.let_go(end.ticket.hashes)
        self._num_read += end.num_usable
        self._touch(
            [block_hash for block_hash in end.ticket.hashes if block_hash in self._namespace_of]
        )
        self._costs.end(end)

    def _write_copied(self) -> None:
        num_copied = self._swapper.num_saved
        for _ in range(num_copied - self._num_copied):
            save = self._leaving.popleft()
            self._writes.submit(partial(self._write, save))
        self._num_copied = num_copied

    def _take_found(self) -> None:
        """Blocks of an earlier life join as the least recently used, the oldest of them first of
        all."""
        for _ in range(min(MOST_FOUND, len(self._found))):
            block = self._found.pop()
            is_known = block.block_hash in self._namespace_of or block.block_hash in self._saving
            if is_known or self._num_used_bytes + self._file_bytes > self._files.max_bytes:
                if not is_known:
                    self._writes.submit(partial(self._drop, block.namespace, block.block_hash))
                continue
            self._on_gained(block.parent, block.block_hash)
            self._namespace_of[block.block_hash] = block.namespace
            self._namespace_of.move_to_end(block.block_hash, last=False)

    def _make_room(self, kept: Collection[bytes]) -> bool:
        """Deletes what was used least recently until another file fits. Whether it does."""
        while self._num_used_bytes + self._file_bytes > self._files.max_bytes:
            unused = (
                each
                for each in self._namespace_of
                if each not in kept and each not in self._reading
            )
            if (oldest := next(unused, None)) is None:
                return False
            self._lose(oldest)
        return True

    def _lose(self, block_hash: bytes) -> None:
        namespace = self._namespace_of.pop(block_hash)
        self._on_lost([block_hash])
        self._writes.submit(partial(self._drop, namespace, block_hash))

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Marks hashes as used, the first of a sequence last."""
        for block_hash in reversed(hashes):
            self._namespace_of.move_to_end(block_hash)
            self._used.pop(block_hash, None)
            self._used[block_hash] = None

    def _touch_used(self) -> None:
        """Has the order of use noted in files, from which a later life takes it."""
        held = self._namespace_of
        used = self._used
        self._used, self._touch_at = {}, self._clock() + TOUCH_SECONDS
        namespace_of = {block_hash: held[block_hash] for block_hash in used if block_hash in held}
        self._writes.submit(partial(self._touch_files, namespace_of))

    def _note_written(self, save: _Save, is_written: bool) -> None:
        del self._saving[save.block_hash]
        self._free_slots.append(save.slot)
        if is_written and not self._failure:
            self._num_written += 1
            self._on_gained(save.parent, save.block_hash)
            self._namespace_of[save.block_hash] = save.owner.namespace

    def _note_read(self, part: Part, num_read: int) -> None:
        self._loads.note_read(part, num_read)
        if num_read < len(part.slots) and not self._failure:
            self._num_damaged += 1
            # The blocks behind it may be as good as those before it: they wait for a sequence that
            # gets there.
            if (damaged := part.hashes[num_read]) in self._namespace_of:
                self._lose(damaged)

    def _note_failed(self, reason: str) -> None:
        """Once: nothing is held or on its way any more."""
        if self._failure:
            return
        self._failure = reason
        log.error(
            "kv blocks on disk: %s; the disk is not used until the engine starts again", reason
        )
        lost = list(self._namespace_of)
        self._namespace_of.clear()
        self._found.clear()
        self._on_lost(lost)
        self._loads.cancel_all()

    # The methods below run beside the step loop.

    def _scan_files(self) -> None:
        with self._ends_use("read"):
            found = list(self._files.scan())
            num_too_many = max(len(found) - self._files.max_bytes // self._file_bytes, 0)
            # Before anything is written: the disk may be full, which is why fewer are allowed now.
            for block in found[:num_too_many]:
                self._files.drop(block.namespace, block.block_hash)
            self._costs.assume(self._files.measure(self._block_bytes))
            # At once: the newest, at the end, are taken first.
            self._found.extend(found[num_too_many:])
        self._results.append(self._note_scanned)

    def _note_scanned(self) -> None:
        self._is_scanning = False

    def _write(self, save: _Save) -> None:
        is_written = False
        with self._ends_use("written to"):
            if not self._failure:
                payload = memoryview(self._swapper.slots[save.slot])
                is_written = self._files.write(save.owner, save.block_hash, save.parent, payload)
        self._results.append(partial(self._note_written, save, is_written))

    def _read(self, part: Part) -> None:
        namespaces = [self._namespace_of.get(block_hash) for block_hash in part.hashes]
        self._reads.submit(partial(self._read_part, part, namespaces))

    def _read_part(self, part: Part, namespaces: Sequence[bytes | None]) -> None:
        num_read = 0
        with self._ends_use("read"):
            for namespace, block_hash, slot in zip(
                namespaces, part.hashes, part.slots, strict=True
            ):
                into = memoryview(self._swapper.slots[slot])
                if (
                    self._failure
                    or namespace is None
                    or not self._files.read(namespace, block_hash, into)
                ):
                    break
                num_read += 1
        self._results.append(partial(self._note_read, part, num_read))

    def _read_lent(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        with self._ends_use("read"):
            return not self._failure and self._files.read(namespace, block_hash, into)
        return False

    def _drop(self, namespace: bytes, block_hash: bytes) -> None:
        with self._ends_use("written to"):
            self._files.drop(namespace, block_hash)

    def _touch_files(self, namespace_of: Mapping[bytes, bytes]) -> None:
        with self._ends_use("written to"):
            for block_hash, namespace in namespace_of.items():
                self._files.touch(namespace, block_hash)

    @contextmanager
    def _ends_use(self, done: str) -> Iterator[None]:
        """Scope in which the disk is read or written to; an error of it ends its use."""
        try:
            yield
        except OSError as error:
            what = "it is full" if is_disk_full(error) else f"it cannot be {done}"
            self._results.append(partial(self._note_failed, f"{what} ({error})"))
