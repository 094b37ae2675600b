"""The protocol of a block source: a place, other than the KV cache, from which blocks of a prefix
can be loaded.

Host memory is one; a disk, another replica or a prefill worker can be. Knows nothing about slots,
devices or requests. `Engine(..., sources=[...])` takes sources; `StagedLoads` helps where blocks
come into host memory first, and `check_rounds` of tests/engine_core/random_schedules.py runs a
source under random schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from ..page_groups import num_blocks_of
from .value.tier_order import NO_TURN, GivenBack


class Owner(NamedTuple):
    """Owner of blocks that are saved."""

    namespace: bytes
    """Root of the hash chain."""
    tenant: str = ""


NOT_OURS: Collection[bytes] = ()
"""Result of `held` of a source whose blocks do not count as this engine's, such as those of another
replica."""


OnLost = Callable[[Sequence[bytes]], None]
OnGained = Callable[[bytes, bytes], None]


class Outcome(Enum):
    LOADED = "loaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One load. Two loads of the same blocks have two tickets, which are not equal."""

    hashes: Sequence[bytes]
    blocks: Sequence[int]
    """KV blocks that the load fills, one for each hash. The source may write to them until the
    ticket has ended."""

    @property
    def num_blocks(self) -> int:
        """Pages of first groups, of which each block has one."""
        return num_blocks_of(self.hashes)


@dataclass(frozen=True, slots=True, eq=False)
class LoadEnd:
    """How a load ended. After it the source does not touch the ticket's blocks."""

    ticket: Ticket
    outcome: Outcome
    hashes: Sequence[bytes] = ()
    """Hashes of what the ticket's leading blocks contain now, as the source identified what it
    read, not as it was asked; fewer than the ticket's where only leading blocks were loaded. Counts
    for `LOADED` only."""

    @property
    def num_usable(self) -> int:
        """Number of leading blocks that may be cached. A load that ended with an unexpected hash
        has failed as a whole: its other blocks are not trusted either."""
        asked = self.ticket.hashes
        if self.outcome is not Outcome.LOADED or list(self.hashes) != list(
            asked[: len(self.hashes)]
        ):
            return 0
        return len(self.hashes)

    @property
    def num_blocks(self) -> int:
        """Usable pages of first groups, of which each block has one."""
        return num_blocks_of(self.hashes[: self.num_usable])


class Loader(Protocol):
    """The methods of a block source that a load uses."""

    @property
    def tier(self) -> str:
        """Name of this kind of source in usage and metrics."""

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        """Asks for the contents of `hashes` in `blocks`, which no request uses until the ticket has
        ended."""

    def cost(self, num_blocks: int) -> float:
        """Estimated seconds until `num_blocks` blocks are loaded, after the loads in flight."""

    def cancel(self, ticket: Ticket) -> None:
        """Requests the early end of a load. Its ticket still ends once the source has released its
        blocks."""


class BlockSource(Loader, Protocol):
    """Called by the step loop alone, between steps: no method waits for a device, a disk or a
    network.

    With several page groups, `hashes` are keys of pages (`PageKeys`) and `blocks` are pages.

    The engine core does not see what is in a block. It believes a source about contents as far as
    `LoadEnd.hashes` says: a source that stores blocks has to store their hashes with them, and to
    report those.
    """

    @property
    def held(self) -> Collection[bytes]:
        """Hashes that the engine reports to the prefix index while this source holds them. Always
        the same object; `NOT_OURS` for blocks that do not count as this engine's. A hash is added
        in `save`, while its block is cached on the device, or later, after a call of
        `on_gained`."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether the source takes blocks of this engine; `save` is not called where it does not.
        Does not change."""

    @property
    def spares_steps(self) -> bool:
        """Whether the source exists so that this engine need not compute its blocks: the time to
        compute them then counts once more for each decoding request, as in routing."""

    @property
    def has_background_work(self) -> bool:
        """Whether `poll` is to be called soon although no load is open."""

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        """Called once, before all other methods. Both callbacks are to be called in the step loop:
        `on_lost` with hashes that have left `held`; `on_gained`, within `poll`, before a hash is
        added to it, with the hash before it in its chain (or empty) first."""

    def find(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that could be loaded now. May be wrong: their load fails
        then."""

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        """Offers blocks that no request uses at present, in order of their chain; the source may
        copy all, some or none. Blocks whose hashes it holds count as just used. `parents`: the
        hashes before them in their chain, empty before the first; `given`: the turn that used them,
        for eviction by value."""

    def launch(self) -> None:
        """Begins what `load` and `save` asked for since the last call. It is called after either
        and between polls while a load is open. Steps that are submitted later may overwrite saved
        blocks: a source that has not read them by then makes the executor's swapper delay such a
        step."""

    def poll(self) -> Sequence[LoadEnd]:
        """Loads that ended since the last call, in any order. Each ticket ends once."""

    def close(self) -> None:
        """Ends the source with its engine: nothing is called any more, and the KV cache is not
        touched after this."""
