"""The block source in host memory: more room than on the device, and faster than computing.

A block is copied when no request uses it any more; that is long before the cache evicts it, unless
running requests have nearly all blocks. Knows hashes, blocks and slots; knows nothing about
requests or how copies are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from itertools import compress

import numpy as np

from ..executor import Swapper, SwapPlan
from .block_source import LoadEnd, OnGained, OnLost, Outcome, Owner, Ticket
from .lending import Read
from .prefix_hash import num_leading
from .value.tier_order import NO_TURN, GivenBack, RecencyOrder, TierOrder


class HostBlocks:
    """See `BlockSource` and `Lender`. Slots of host memory, each with a copy of a cached block.

    Loads end in the order in which they were asked for, and never fail.
    """

    tier = "host"
    keeps_blocks = True
    spares_steps = False
    has_background_work = False

    def __init__(self, swapper: Swapper, num_slots: int, order: TierOrder | None = None) -> None:
        """`order`: in which copies are evicted; None: the least recently used goes first."""
        self.num_slots = num_slots
        self.num_saved = self.num_loaded = 0
        """Numbers of blocks whose copies to host memory were launched, and of blocks copied back,
        so far."""
        self._swapper = swapper
        self._order = order or RecencyOrder()
        self._slot_of: dict[bytes, int] = {}
        self._free_slots = list(reversed(range(num_slots)))
        """The last are taken first."""
        self._loads: deque[tuple[int, Ticket]] = deque()
        """Loads under way: number of blocks that will have been copied, over all loads so far, when
        the ticket is done."""
        self._num_asked = 0
        """Number of blocks that loads have requested so far."""
        self._cancelled: set[Ticket] = set()
        self._save_number = np.zeros(num_slots, np.int64)
        """[num_slots] launched saves up to the one that fills a slot."""
        self._saves: tuple[list[int], list[int]] = ([], [])
        """Blocks and slots of saves that were not launched."""
        self._fetches: tuple[list[int], list[int]] = ([], [])
        """Slots and blocks of loads that were not launched."""
        self._on_lost: OnLost = lambda _: None

    @property
    def num_used_slots(self) -> int:
        return len(self._slot_of)

    @property
    def is_saving(self) -> bool:
        """Whether blocks are yet to be copied to their slots."""
        return bool(self._saves[0]) or self._swapper.num_saved < self.num_saved

    @property
    def held(self) -> Collection[bytes]:
        return self._slot_of

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        self._on_lost = on_lost

    def find(self, hashes: Sequence[bytes]) -> int:
        return num_leading(hashes, self._slot_of)

    def cost(self, num_blocks: int) -> float:
        """Seconds by the swapper's time for a block; blocks on their way come first."""
        return (self._num_asked - self.num_loaded + num_blocks) * self._swapper.seconds_per_block

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = Ticket(hashes, blocks)
        self._fetches[0].extend(self._slot_of[block_hash] for block_hash in hashes)
        self._fetches[1].extend(blocks)
        self._num_asked += len(hashes)
        self._order.hold(hashes, is_move=False)
        self._loads.append((self._num_asked, ticket))
        return ticket

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        slot_of = self._slot_of
        offered = hashes
        indexes: Sequence[int] = range(given.start, given.start + len(hashes))
        if known := list(filter(slot_of.__contains__, hashes)):
            self._order.hold(known, is_move=given.is_move)
            is_fresh = [block_hash not in slot_of for block_hash in hashes]
            hashes = list(compress(hashes, is_fresh))
            blocks = list(compress(blocks, is_fresh))
            indexes = list(compress(indexes, is_fresh))
        # In order, neighbours are one copy when they come back.
        slots = sorted(self._take_slots(len(hashes)))
        # Where there are too few slots, the first blocks are worth most.
        hashes = hashes[: len(slots)]
        slot_of.update(zip(reversed(hashes), reversed(slots), strict=True))
        self._order.fill(hashes, indexes)
        self._order.let_go(list(filter(slot_of.__contains__, offered)), given)
        self.num_saved += len(slots)
        self._saves[0].extend(blocks[: len(slots)])
        self._saves[1].extend(slots)

    def launch(self) -> None:
        if not (self._saves[0] or self._fetches[0]):
            return
        places = [np.array(each, np.int32) for each in (*self._saves, *self._fetches)]
        out_blocks, out_slots, in_slots, in_blocks = places
        self._saves = ([], [])
        self._fetches = ([], [])
        # Neighbouring slots are one copy. Of a slot that was taken twice, the last save comes last.
        order = out_slots.argsort(kind="stable")
        out_blocks = out_blocks[order]
        out_slots = out_slots[order]
        self._save_number[out_slots] = np.arange(self.num_saved - order.size, self.num_saved) + 1
        self._swapper.swap(
            SwapPlan(
                out_blocks=out_blocks, out_slots=out_slots, in_slots=in_slots, in_blocks=in_blocks
            )
        )
        # Called without leases too: a swapper keeps a record of each copy until it is counted.
        _ = self._swapper.num_saved

    def cancel(self, ticket: Ticket) -> None:
        """A copy cannot be called back: the ticket ends when it is done."""
        self._cancelled.add(ticket)

    def poll(self) -> list[LoadEnd]:
        ends: list[LoadEnd] = []
        if not self._loads:
            return ends
        self.num_loaded = self._swapper.num_loaded
        while self._loads and self._loads[0][0] <= self.num_loaded:
            ticket = self._loads.popleft()[1]
            self.let_go(ticket.hashes)
            if ticket in self._cancelled:
                self._cancelled.remove(ticket)
                ends.append(LoadEnd(ticket, Outcome.CANCELLED))
            else:
                self._order.touch(ticket.hashes)
                ends.append(LoadEnd(ticket, Outcome.LOADED, ticket.hashes))
        return ends

    def close(self) -> None:
        """Does nothing: the memory is the swapper's, and the executor waits for the last copies."""

    def hold(self, hashes: Sequence[bytes]) -> list[Read]:
        """Blocks whose copies to their slots are not made yet are not here yet."""
        num_saved = self._swapper.num_saved
        unlaunched = set(self._saves[1])
        reads = list[Read]()
        for block_hash in hashes:
            slot = self._slot_of.get(block_hash)
            if slot is None or slot in unlaunched or self._save_number[slot] > num_saved:
                break
            reads.append(partial(self._read, slot))
        self._order.hold(hashes[: len(reads)], is_move=True)
        return reads

    def _read(self, slot: int, into: memoryview) -> bool:
        into[:] = memoryview(self._swapper.slots[slot])
        return True

    def let_go(self, hashes: Sequence[bytes]) -> None:
        self._order.let_go(hashes)

    def _take_slots(self, count: int) -> list[int]:
        """Allocates up to `count` slots, and evicts blocks that nothing holds where too few are
        free."""
        free = self._free_slots
        if (missing := count - len(free)) > 0:
            lost = self._order.take(missing)
            free.extend(map(self._slot_of.pop, lost))
            self._on_lost(lost)
        start = max(len(free) - count, 0)
        taken = free[start:]
        del free[start:]
        return taken
