"""Prefetches: prompts whose blocks are pulled while another engine still computes them.

Asks the holder for the next blocks, waits a while, asks again. What has come is cached prefix,
which requests may evict; only what is on its way is held. Knows hashes, blocks and what requests
need; knows nothing about steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from ...kv.block_loads import BlockLoads
from ...kv.block_pool import BlockPool
from ...kv.block_source import Ticket
from ...kv.early_pull import EarlyPull
from ...kv.peer_blocks import PeerBlocks
from ...kv.prefetch import NewPrefetch
from ...kv.prefix_cache import HashChain
from ...page_groups import is_block_hash
from ...request import Holder
from .prefetched_blocks import PrefetchedBlocks

SPARE_SHARE = 4
"""One in `SPARE_SHARE` of the blocks that requests do not need may be in flight for prefetches."""
MOST_LOADS = 3
"""Most loads of a prefetch in flight. Each is one chunk of the holder's prefill, which the holder
lends when that chunk's step has ended."""
MIN_PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 0.05
"""Longest pause before a prefetch asks a holder again that had no more blocks; pauses double up to
it. Longer ones would miss prompts that wait in a queue and are then computed within a few tenths of
a second."""
MOST_EMPTY_ASKS = 1200
"""Number of empty answers in a row after which a prefetch is given up: about a minute."""
LOOK_SECONDS = 0.005
"""Seconds between two polls of loads by an idle engine. Arriving blocks wake it at once."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    chain: HashChain
    holder: Holder
    ends_at: float
    due_at: float
    chunk_blocks: int
    pause: float = MIN_PAUSE_SECONDS
    num_empty_asks: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    """Loads that are on their way."""
    has_ended: bool = False
    """Whether the prefetch asks for no more blocks; it is removed once its loads have ended."""
    awaited: list[Ticket] = field(default_factory=list)
    """Loads that were open when the request arrived; the request counts its own waits."""


class Needs(Protocol):
    """Interface to the needs of requests, which are served before prefetches."""

    @property
    def num_blocks_needed(self) -> int:
        """Free blocks that running requests grow into next and waiting requests begin with."""

    @property
    def awaits_any_load(self) -> bool:
        """Whether a request is held until a load has ended."""

    def awaits(self, ticket: Ticket) -> bool:
        """Whether a request is held until this load has ended."""


class Prefetches:
    """Prefetches that have not ended, oldest first. An engine that neither pulls nor caches blocks
    has none."""

    def __init__(
        self,
        peers: PeerBlocks | None,
        pool: BlockPool,
        loads: BlockLoads,
        prefetched: PrefetchedBlocks,
        clock: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._pool = pool
        self._loads = loads
        self._prefetched = prefetched
        self._clock = clock
        self._open: dict[int, _Prefetch] = {}
        self.num_blocks = 0
        """Number of blocks received so far."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_loading(self) -> int:
        """Loads that are on their way."""
        return sum(len(each.tickets) for each in self._open.values())

    @property
    def num_loading_blocks(self) -> int:
        return sum(len(ticket.blocks) for each in self._open.values() for ticket in each.tickets)

    @property
    def idle_seconds(self) -> float | None:
        """How long an engine that has nothing else to do may sleep; None where no prefetch is
        open."""
        if not self._open:
            return None
        if self.num_loading:
            return LOOK_SECONDS
        return max(
            0.0, min(min(each.due_at, each.ends_at) for each in self._open.values()) - self._clock()
        )

    def add(self, new: NewPrefetch) -> None:
        assert new.number not in self._open
        if new.hashes and self._peers is not None:
            now = self._clock()
            chain = HashChain(new.namespace, new.tenant, list(new.hashes))
            self._open[new.number] = _Prefetch(
                chain, new.holder, now + new.seconds, now, max(1, new.chunk_blocks)
            )

    def end(self, number: int) -> None:
        """Ends a prefetch; an ended one is ignored. Blocks that are being sent still arrive, since
        the request may follow."""
        if (prefetch := self._open.get(number)) is not None:
            self._end(number, prefetch)

    def end_for(self, chain: HashChain) -> None:
        """Ends the prefetches of prompts that are prefixes of this sequence: its request has
        arrived and pulls by itself."""
        for number, prefetch in list(self._open.items()):
            hashes = prefetch.chain.hashes
            # A hash stands for all blocks before it.
            if len(chain.hashes) >= len(hashes) and chain.hashes[len(hashes) - 1] == hashes[-1]:
                prefetch.awaited += filter(self._loads.is_open, prefetch.tickets)
                self._end(number, prefetch)

    def advance(self, needs: Needs) -> None:
        """Goes on with every prefetch. To be called before a step is planned: blocks are
        allocated."""
        if not self._open:
            return
        self._yield_blocks(needs)
        now = self._clock()
        for number, prefetch in list(self._open.items()):
            for ticket in [each for each in prefetch.tickets if not self._loads.is_open(each)]:
                self._note_load_ended(prefetch, ticket)
            prefetch.has_ended |= now >= prefetch.ends_at
            if prefetch.has_ended or self._is_whole(prefetch):
                self._end(number, prefetch)
                continue
            while now >= prefetch.due_at and len(prefetch.tickets) < MOST_LOADS:
                self._ask(prefetch, needs)

    def _end(self, number: int, prefetch: _Prefetch) -> None:
        prefetch.has_ended = True
        if not prefetch.tickets:
            del self._open[number]

    def _num_spare(self, needs: Needs) -> int:
        """Free blocks beyond those that requests need; negative where requests lack blocks."""
        return self._pool.num_free - needs.num_blocks_needed

    def _yield_blocks(self, needs: Needs) -> None:
        """Gives up loads while requests lack blocks, except those that a request waits for."""
        if self._num_spare(needs) >= 0:
            return
        for ticket in [each for prefetch in self._open.values() for each in prefetch.tickets]:
            if self._loads.is_open(ticket) and not needs.awaits(ticket):
                self._loads.give_up(ticket)

    def _is_whole(self, prefetch: _Prefetch) -> bool:
        hashes = prefetch.chain.hashes
        # The last block tells mostly, and costs one look.
        is_last_there = self._pool.find(hashes[-1]) is not None
        return (
            is_last_there
            and len(self._pool.find_leading(hashes)) == len(hashes)
            and not prefetch.tickets
            and not self._loads.missing_at_end(prefetch.chain)
        )

    def _ask(self, prefetch: _Prefetch, needs: Needs) -> None:
        """Asks the holder for the next chunk of blocks that are neither cached nor in flight, as
        far as there is room."""
        assert self._peers is not None
        chain = prefetch.chain
        start, num_missing = self._next_missing(chain, prefetch.chunk_blocks)
        room = min(
            self._num_spare(needs) // SPARE_SHARE,
            self._peers.most_early(prefetch.holder) - self.num_loading_blocks,
        )
        source = EarlyPull(self._peers, chain.owner, prefetch.holder, chain.parent_of(start))
        ticket = self._loads.load_early(source, chain, start, num_missing, room)
        if ticket is None:
            self._rest(prefetch)
        else:
            prefetch.tickets.append(ticket)

    def _next_missing(self, chain: HashChain, most: int) -> tuple[int, int]:
        """The first run of blocks that are neither cached nor on their way: where it begins, and
        its length up to `most`."""
        hashes = chain.hashes
        is_missing = self._is_missing
        start = len(self._pool.find_leading(hashes))
        while start < len(hashes) and not is_missing(hashes[start]):
            start += 1
        return start, sum(1 for _ in takewhile(is_missing, hashes[start : start + most]))

    def _is_missing(self, block_hash: bytes) -> bool:
        return self._pool.find(block_hash) is None and self._loads.ticket(block_hash) is None

    def _note_load_ended(self, prefetch: _Prefetch, ticket: Ticket) -> None:
        prefetch.tickets.remove(ticket)
        pairs = zip(ticket.hashes, ticket.blocks, strict=True)
        came = [
            (block_hash, block)
            for block_hash, block in pairs
            if self._pool.find(block_hash) == block
        ]
        if not came:
            self._rest(prefetch)
            return
        whole = [each for each in came if is_block_hash(each[0])]
        for block_hash, block in whole if ticket not in prefetch.awaited else ():
            self._prefetched.note(block_hash, block)
        self.num_blocks += len(whole)
        prefetch.num_empty_asks = 0
        prefetch.pause = MIN_PAUSE_SECONDS
        prefetch.due_at = self._clock()

    def _rest(self, prefetch: _Prefetch) -> None:
        """Lets a prefetch rest to which no block came, or which has none to ask for now."""
        prefetch.num_empty_asks += 1
        prefetch.has_ended |= prefetch.num_empty_asks >= MOST_EMPTY_ASKS
        prefetch.due_at = self._clock() + prefetch.pause
        prefetch.pause = min(2 * prefetch.pause, MAX_PAUSE_SECONDS)
