"""Loads that come in two moves: a lane reads blocks into slots of host memory, then the swapper
copies them into the KV cache. No thread but the step loop's touches the cache, so that a load can
end at once when it is given up.

Knows tickets and slots; knows nothing about files, sockets or what is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..executor import Swapper, SwapPlan
from ..page_groups import num_blocks_of
from .block_source import LoadEnd, Outcome, Ticket

PART_BLOCKS = 16
"""Number of blocks that one job reads."""


@dataclass(slots=True, eq=False)
class StagedLoad:
    ticket: Ticket
    num_assigned: int = 0
    """Leading blocks that have, or had, a slot."""
    num_good: int = 0
    """Number of leading blocks that can be used; decreases where a block cannot be read."""
    num_reading: int = 0
    """Number of parts that are being read."""
    num_swapping: int = 0
    """Blocks that are being copied into the cache."""
    is_cancelled: bool = False

    @property
    def is_assigned(self) -> bool:
        return self.is_cancelled or self.num_assigned >= self.num_good


@dataclass(slots=True, eq=False)
class Part:
    """Neighbouring blocks of a load, each with the slot that it is read into."""

    load: StagedLoad
    start: int
    slots: list[int] = field(default_factory=list)

    @property
    def hashes(self) -> Sequence[bytes]:
        return self.load.ticket.hashes[self.start : self.start + len(self.slots)]

    def num_blocks_behind(self, num_pages: int) -> int:
        """Number of blocks whose page of the first group is after the first `num_pages` pages of
        the part."""
        return num_blocks_of(self.hashes[num_pages:])


class StagedLoads:
    """`read` begins to read a part; `note_read` is called in the step loop when that has ended."""

    def __init__(
        self, swapper: Swapper, free_slots: deque[int], read: Callable[[Part], None]
    ) -> None:
        """`free_slots` may be shared: others take some and bring them back."""
        self._swapper = swapper
        self._free_slots = free_slots
        self._read = read
        self._loads: deque[StagedLoad] = deque()
        """Open loads in the order of their requests."""
        self._fetches: list[tuple[StagedLoad, int, int]] = []
        """Slots and blocks to be copied with the next plan."""
        self._swaps: deque[tuple[StagedLoad, int]] = deque()
        """Slots that are being copied, in the swapper's order."""
        self._num_swapped = 0
        self._by_ticket: dict[Ticket, StagedLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_waiting_blocks(self) -> int:
        """Number of requested blocks that are not read yet."""
        return sum(
            load.num_good - load.num_assigned for load in self._loads if not load.is_assigned
        )

    def load(self, ticket: Ticket) -> None:
        load = StagedLoad(ticket, num_good=len(ticket.hashes))
        self._loads.append(load)
        self._by_ticket[ticket] = load

    def launch(self) -> None:
        """Copies what was read, and reads on where slots are free."""
        if self._fetches:
            pairs = np.array([(slot, block) for _, slot, block in self._fetches], np.int32)
            self._swaps += ((load, slot) for load, slot, _ in self._fetches)
            self._fetches.clear()
            self._swapper.swap(SwapPlan(in_slots=pairs[:, 0].copy(), in_blocks=pairs[:, 1].copy()))
        for load in self._loads:
            while not load.is_assigned and self._free_slots:
                count = min(PART_BLOCKS, load.num_good - load.num_assigned, len(self._free_slots))
                part = Part(
                    load, load.num_assigned, [self._free_slots.popleft() for _ in range(count)]
                )
                load.num_assigned += count
                load.num_reading += 1
                self._read(part)

    def note_read(self, part: Part, num_read: int) -> None:
        """The leading `num_read` blocks of a part are in their slots, the others could not be
        read."""
        load = part.load
        load.num_reading -= 1
        if num_read < len(part.slots):
            load.num_good = min(load.num_good, part.start + num_read)
        if load.is_cancelled:
            num_read = 0
        blocks = load.ticket.blocks[part.start :]
        self._fetches += (
            (load, slot, block) for slot, block in zip(part.slots[:num_read], blocks, strict=False)
        )
        load.num_swapping += num_read
        self._free_slots.extend(part.slots[num_read:])

    def cancel(self, ticket: Ticket) -> None:
        """Ends a ticket with the next poll, or when its copies have ended."""
        self._cancel(self._by_ticket[ticket])

    def cancel_all(self) -> None:
        for load in self._loads:
            self._cancel(load)

    def poll(self) -> list[LoadEnd]:
        if not self._loads:
            return []
        num_done = self._swapper.num_loaded - self._num_swapped
        self._num_swapped += num_done
        for _ in range(num_done):
            load, slot = self._swaps.popleft()
            load.num_swapping -= 1
            self._free_slots.append(slot)
        ended = [load for load in self._loads if self._has_ended(load)]
        for load in ended:
            self._loads.remove(load)
            del self._by_ticket[load.ticket]
        return [self._end_of(load) for load in ended]

    def _cancel(self, load: StagedLoad) -> None:
        load.is_cancelled = True
        stays = [each for each in self._fetches if each[0] is not load]
        self._free_slots.extend(slot for each, slot, _ in self._fetches if each is load)
        load.num_swapping -= len(self._fetches) - len(stays)
        self._fetches = stays

    def _has_ended(self, load: StagedLoad) -> bool:
        if load.num_swapping:
            return False
        return load.is_cancelled or (load.is_assigned and not load.num_reading)

    def _end_of(self, load: StagedLoad) -> LoadEnd:
        if load.is_cancelled:
            return LoadEnd(load.ticket, Outcome.CANCELLED)
        if not load.num_good:
            return LoadEnd(load.ticket, Outcome.FAILED)
        return LoadEnd(load.ticket, Outcome.LOADED, load.ticket.hashes[: load.num_good])
