"""Block sources beside the simulated executor: one whose loads end as a test says, and one that can
be relied on in nothing. Adding them touches no file of the engine core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.kv.block_source import (
    NOT_OURS,
    LoadEnd,
    OnGained,
    OnLost,
    Outcome,
    Owner,
    Ticket,
)
from headwater.engine_core.kv.value.tier_order import NO_TURN, GivenBack

GARBAGE = np.uint64(0xDEAD)


class ScriptedSource:
    """Keeps copies of all blocks that are saved. Loads end when `end` is called."""

    def __init__(
        self,
        kv_blocks: UInt64Array,
        *,
        seconds_per_block: float = 0.0,
        is_local: bool = True,
        protect: Callable[[Sequence[int]], None] = lambda blocks: None,
    ) -> None:
        """kv_blocks [num_blocks, block_size]. What is not local is not announced as this engine's.
        `protect` is called with blocks before they are written."""
        self.open: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        self.is_closed = False
        self._kv_blocks = kv_blocks
        self._seconds_per_block = seconds_per_block
        self._is_local = is_local
        self._protect = protect
        self._contents: dict[bytes, UInt64Array] = {}
        self._saving: list[tuple[bytes, int]] = []
        self._ends: list[LoadEnd] = []
        self._on_lost: OnLost = lambda _: None

    tier = "elsewhere"
    keeps_blocks = True
    spares_steps = False
    has_background_work = False

    @property
    def held(self) -> Collection[bytes]:
        return self._contents if self._is_local else NOT_OURS

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        self._on_lost = on_lost

    def find(self, hashes: Sequence[bytes]) -> int:
        held = [block_hash in self._contents for block_hash in hashes]
        return held.index(False) if False in held else len(held)

    def cost(self, num_blocks: int) -> float:
        return num_blocks * self._seconds_per_block

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        assert not self.is_closed
        assert len(hashes) == len(blocks) > 0
        self.open.append(Ticket(hashes, blocks))
        return self.open[-1]

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        assert not self.is_closed
        assert len(parents) == len(hashes)
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block_hash not in self._contents:
                self._contents[block_hash] = np.zeros(0, np.uint64)
                self._saving.append((block_hash, block))

    def launch(self) -> None:
        for block_hash, block in self._saving:
            if block_hash in self._contents:
                self._contents[block_hash] = self._kv_blocks[block].copy()
        self._saving.clear()

    def cancel(self, ticket: Ticket) -> None:
        assert ticket in self.open
        self.cancelled.append(ticket)

    def poll(self) -> list[LoadEnd]:
        ends = self._ends
        self._ends = []
        return ends

    def close(self) -> None:
        self.is_closed = True

    def end(
        self,
        ticket: Ticket,
        outcome: Outcome = Outcome.LOADED,
        hashes: Sequence[bytes] | None = None,
    ) -> None:
        """The ticket ends: blocks contain what `hashes` name (None: what it asked for) or garbage,
        and that is said."""
        self.open.remove(ticket)
        hashes = ticket.hashes if hashes is None else hashes
        self._protect(ticket.blocks)
        for block, block_hash in zip(ticket.blocks, hashes, strict=False):
            self._kv_blocks[block] = self._contents.get(block_hash, GARBAGE)
        self._kv_blocks[list(ticket.blocks[len(hashes) :])] = GARBAGE
        self._ends.append(LoadEnd(ticket, outcome, hashes))

    def lose(self, block_hash: bytes) -> None:
        del self._contents[block_hash]
        if self._is_local:
            self._on_lost([block_hash])


class LyingSource(ScriptedSource):
    """By lot: claims what it has not, forgets what it has, is late, fails, loads a part or the
    blocks of others, ends loads in another order than asked, and cancels them by itself or not when
    it is told to. Only its tickets say what their blocks contain."""

    def __init__(
        self,
        kv_blocks: UInt64Array,
        seed: int,
        *,
        most_polls: int,
        seconds_per_block: float = 0.0,
        is_local: bool = True,
        protect: Callable[[Sequence[int]], None] = lambda blocks: None,
    ) -> None:
        """A load takes up to `most_polls` polls."""
        super().__init__(
            kv_blocks, seconds_per_block=seconds_per_block, is_local=is_local, protect=protect
        )
        self._rng = np.random.default_rng(seed)
        self._most_polls = most_polls
        self._polls_left: dict[Ticket, int] = {}

    def find(self, hashes: Sequence[bytes]) -> int:
        num_held = super().find(hashes)
        return (
            min(len(hashes), num_held + int(self._rng.integers(1, 4)))
            if self._happens(0.3)
            else num_held
        )

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = super().load(hashes, blocks)
        self._polls_left[ticket] = int(self._rng.integers(0, self._most_polls + 1))
        return ticket

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        kept = [each for each in zip(hashes, blocks, parents, strict=True) if self._happens(0.8)]
        super().save(
            [each[0] for each in kept],
            [each[1] for each in kept],
            [each[2] for each in kept],
            owner,
            given,
        )

    def cancel(self, ticket: Ticket) -> None:
        super().cancel(ticket)
        if self._happens(0.5):
            self._polls_left[ticket] = min(self._polls_left[ticket], 2)

    def poll(self) -> list[LoadEnd]:
        # What was saved in this step may be what a load brings.
        self.launch()
        # An engine that has nothing to do has nothing to say either.
        if self._polls_left and self._contents and self._happens(0.2):
            self.lose(self._any_held())
        for ticket in self._polls_left:
            self._polls_left[ticket] -= 1
            # What is on its way is not yet what it will be.
            self._protect(ticket.blocks)
            self._kv_blocks[list(ticket.blocks)] = GARBAGE
        due = [ticket for ticket, polls_left in self._polls_left.items() if polls_left < 0]
        self._rng.shuffle(due)
        for ticket in due:
            del self._polls_left[ticket]
            self._end_by_lot(ticket)
        return super().poll()

    def _end_by_lot(self, ticket: Ticket) -> None:
        asked = list(ticket.hashes)
        there = asked[: ScriptedSource.find(self, asked)]
        match self._rng.integers(0, 10):
            case 0:
                self.end(ticket, Outcome.FAILED)
            case 1:
                self.end(ticket, Outcome.CANCELLED, there)
            case 2:
                self.end(ticket, Outcome.LOADED, there[: len(there) // 2])
            case 3:
                self.end(
                    ticket,
                    Outcome.LOADED,
                    [*there[:-1], self._any_held()] if self._contents else [],
                )
            case 4:
                self.end(ticket, Outcome.LOADED, there[::-1])
            case 5:
                self.end(ticket, Outcome.LOADED, [*there, b"?" * 16])
            case _:
                self.end(ticket, Outcome.LOADED, there)

    def _any_held(self) -> bytes:
        hashes = list(self._contents)
        return hashes[self._rng.integers(0, len(hashes))]

    def _happens(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)
