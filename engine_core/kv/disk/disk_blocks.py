"""The block source on a disk: more room than in memory, and there again after a restart.

A block is copied to a slot of host memory when no request uses it any more, and written from
there. Threads write and read, so that no step waits. When the disk fails or is full this source
gives up: it has nothing from then on, and says why. Knows hashes, blocks and slots; knows nothing
about requests.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from ...executor import Swapper
from ...step_output import DiskUse
from ...system.lanes import Lane, ThreadLane
from ..block_record import BlockId
from ..block_source import LoadEnd, OnGained, OnLost, Owner, Ticket
from ..lending import Read
from ..prefix_hash import num_leading
from ..read_costs import ReadCosts
from ..staged_loads import Part, StagedLoads
from ..value.tier_order import NO_TURN, GivenBack, RecencyOrder, TierOrder
from .block_files import BlockFiles
from .disk_jobs import DiskJobs
from .disk_saves import DiskSave, DiskSaves, SavedChain
from .held_hashes import HeldHashes

log = logging.getLogger(__name__)
NUM_READERS = 3
MOST_FOUND = 256
"""Most files of an earlier run that one poll adds."""


class DiskBlocks:
    """See `BlockSource` and `Lender`."""

    tier = "disk"
    keeps_blocks = True
    spares_steps = False

    def __init__(
        self,
        swapper: Swapper,
        files: BlockFiles,
        order: TierOrder | None = None,
        *,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        writes: Lane | None = None,
        reads: Lane | None = None,
    ) -> None:
        """`swapper`: has the slots through which blocks are copied. `order`: in which files are
        deleted; None: the least recently used goes first. `writes` runs one job after another."""
        self._swapper = swapper
        self._file_bytes = files.file_bytes(swapper.slots.shape[1])
        self._most_files = files.num_blocks(swapper.slots.shape[1])
        self._jobs = DiskJobs(
            files,
            swapper.slots,
            writes or ThreadLane("kv-write"),
            reads or ThreadLane("kv-read", NUM_READERS),
            self._on_failed,
        )
        self._held = HeldHashes(clock, order or RecencyOrder())
        self._free_slots = deque(range(len(swapper.slots)))
        self._saves = DiskSaves(swapper, self._free_slots)
        self._loads = StagedLoads(swapper, self._free_slots, self._read)
        self._costs = ReadCosts(clock)
        self._found: deque[BlockId] = deque()
        self._is_scanning = True
        self._block_size = block_size
        self._use = DiskUse(max_bytes=files.max_bytes)
        self._on_lost: OnLost = lambda _: None
        self._on_gained: OnGained = lambda parent, block_hash: None
        self._jobs.scan(self._note_scanned)

    @property
    def use(self) -> DiskUse:
        return replace(
            self._use,
            num_blocks=len(self._held),
            num_bytes=self._num_used_bytes,
            failure=self._jobs.failure,
        )

    @property
    def held(self) -> Collection[bytes]:
        return self._held.namespace_of.keys()

    @property
    def has_background_work(self) -> bool:
        return bool(self._is_scanning or self._found or self._saves or self._jobs.has_results)

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        self._on_lost = on_lost
        self._on_gained = on_gained

    def find(self, hashes: Sequence[bytes]) -> int:
        return num_leading(hashes, self._held.namespace_of)

    def cost(self, num_blocks: int) -> float:
        """Seconds predicted from recent loads; loads that requests wait for come first."""
        blocks = self._loads.num_waiting_blocks + num_blocks
        return blocks * (self._costs.seconds_per_block + self._swapper.seconds_per_block)

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = Ticket(hashes, blocks)
        self._held.order.hold(hashes, is_move=False)
        self._loads.load(ticket)
        self._costs.begin(ticket)
        return ticket

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        if self._jobs.failure:
            return
        held = self._held
        known = list(filter(held.__contains__, hashes))
        held.touch(known)
        held.order.hold(known, is_move=given.is_move)
        fresh = [
            index
            for index, block_hash in enumerate(hashes)
            if block_hash not in held and block_hash not in self._saves
        ]
        # Where slots or bytes are too few, the first blocks are worth most.
        fresh = fresh[: self._make_room(min(len(fresh), self._saves.num_free_slots))]
        begun = [hashes[index] for index in fresh]
        held.order.fill(begun, [given.start + index for index in fresh])
        offered = {*known, *begun}
        chain = SavedChain(given, [each for each in hashes if each in offered], len(fresh))
        self._saves.ask(
            [
                (self._saves.begin(owner, hashes[index], parents[index], chain), blocks[index])
                for index in fresh
            ]
        )
        self._end_save(chain)

    def launch(self) -> None:
        self._saves.launch()
        self._loads.launch()

    def cancel(self, ticket: Ticket) -> None:
        self._loads.cancel(ticket)

    def poll(self) -> list[LoadEnd]:
        self._jobs.apply_results()
        for save in self._saves.take_copied():
            note = partial(self._note_written, save)
            self._jobs.write(save.owner, save.block_hash, save.parent, save.slot, note)
        self._take_found()
        if used := self._held.take_used():
            self._jobs.touch(used)
        # On devices that copy within the call, what was just read can be used at once.
        self._loads.launch()
        ends = self._loads.poll()
        for end in ends:
            self._settle(end)
        return ends

    def close(self) -> None:
        self._jobs.close()

    @property
    def _num_used_bytes(self) -> int:
        return (len(self._held) + len(self._saves)) * self._file_bytes

    @property
    def _num_free(self) -> int:
        """Number of files for which there is room."""
        return self._most_files - len(self._held) - len(self._saves)

    def hold(self, hashes: Sequence[bytes]) -> list[Read]:
        held = hashes[: self.find(hashes)]
        self._held.order.hold(held, is_move=True)
        namespace_of = self._held.namespace_of
        return [
            partial(self._jobs.read_lent, namespace_of[block_hash], block_hash)
            for block_hash in held
        ]

    def let_go(self, hashes: Sequence[bytes]) -> None:
        self._held.order.let_go(hashes)

    def _settle(self, end: LoadEnd) -> None:
        self.let_go(end.ticket.hashes)
        self._use.num_read += end.num_usable * self._block_size
        self._held.touch(end.ticket.hashes)
        self._costs.end(end)

    def _take_found(self) -> None:
        """Blocks of an earlier run count as the least recently used, the oldest of them first."""
        for _ in range(min(MOST_FOUND, len(self._found))):
            block = self._found.pop()
            is_known = block.block_hash in self._held or block.block_hash in self._saves
            if is_known or not self._num_free:
                if not is_known:
                    self._jobs.drop(block.namespace, block.block_hash)
                continue
            self._on_gained(block.parent, block.block_hash)
            self._held.add_oldest(block)

    def _make_room(self, count: int) -> int:
        """Deletes files until `count` more fit, or all that may be deleted; returns how many fit
        of these."""
        for lost in self._held.order.take(max(0, count - self._num_free)):
            self._lose(lost)
        return min(count, self._num_free)

    def _lose(self, block_hash: bytes) -> None:
        namespace = self._held.lose(block_hash)
        self._on_lost([block_hash])
        self._jobs.drop(namespace, block_hash)

    def _read(self, part: Part) -> None:
        namespaces = [self._held.namespace_of.get(block_hash) for block_hash in part.hashes]
        self._jobs.read(namespaces, part.hashes, part.slots, partial(self._note_read, part))

    def _note_scanned(self, found: Sequence[BlockId], seconds: float | None) -> None:
        self._is_scanning = False
        # In one call, not one a poll: the newest blocks, at the end, are taken first.
        self._found.extend(found)
        if seconds is not None:
            self._costs.assume(seconds)

    def _note_written(self, save: DiskSave, is_written: bool) -> None:
        self._saves.end(save)
        if is_written and not self._jobs.failure:
            self._use.num_written += self._block_size
            self._on_gained(save.parent, save.block_hash)
            self._held.namespace_of[save.block_hash] = save.owner.namespace
        else:
            self._held.order.drop((save.block_hash,))
        self._end_save(save.chain)

    def _end_save(self, chain: SavedChain) -> None:
        """Lets a chain be deleted once all of it is written."""
        if not chain.num_unwritten:
            self._held.order.let_go(chain.hashes, chain.given)

    def _note_read(self, part: Part, num_read: int) -> None:
        self._loads.note_read(part, num_read)
        if num_read < len(part.slots) and not self._jobs.failure:
            self._use.num_damaged += 1
            # Blocks after the damaged one may be intact, so they stay until a sequence reads them.
            if (damaged := part.hashes[num_read]) in self._held:
                self._lose(damaged)

    def _on_failed(self) -> None:
        """Marks the disk as failed: no block is held or being loaded any more."""
        log.error(
            "kv blocks on disk: %s; the disk is not used until the engine starts again",
            self._jobs.failure,
        )
        lost = self._held.lose_all()
        self._found.clear()
        self._on_lost(lost)
        self._loads.cancel_all()
