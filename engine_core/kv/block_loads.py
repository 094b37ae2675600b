"""Blocks between the prefix cache and block sources: picks a source for a prefix, and holds its
blocks until they are loaded.

Knows hash chains, the block pool and sources; knows nothing about requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from typing import NamedTuple

from ..page_groups import FULL, block_of, num_blocks_of
from .block_pool import BlockPool
from .block_source import NOT_OURS, BlockSource, LoadEnd, Loader, Owner, Ticket
from .page_keys import PageKeys
from .prefix_cache import NO_HITS, HashChain, HeldPages, Hits, PrefixCache
from .value.tier_order import GivenBack
from .value.turn import Turn, moved

ONE_GROUP = PageKeys((FULL,), 1)
MIN_PATIENCE_SECONDS = 30.0
PATIENCE = 10
"""Factor on the seconds that a source predicted, after which a load is given up."""


class Offer(NamedTuple):
    """Blocks of a chain that a source has, and their cost in seconds."""

    source: Loader
    num_blocks: int
    cost: float
    num_here: int = 0
    """Number of leading blocks whose pages that every later position needs are cached."""


@dataclass(frozen=True, slots=True)
class SettledLoad:
    """A load that has ended, with or without the blocks: requests no longer wait for it."""

    ticket: Ticket
    failed_source: Loader | None
    """Source of the load, where some blocks that it was asked for are not cached; None: all are."""
    tier: str = field(default="", compare=False)
    num_loaded: int = field(default=0, compare=False)
    """Number of leading blocks of the ticket that were loaded."""


@dataclass(slots=True, kw_only=True)
class _Load:
    source: Loader
    owner: Owner
    turn: Turn
    """Turn of the chain that waits for the blocks."""
    prefix: list[bytes]
    """Hashes of the chain's blocks before the first one."""
    held: Hits
    """Cached blocks that the chain continues, which must not be evicted during the load."""
    here: list[int]
    """Pages between those blocks and the first one that is loaded, pinned as well."""
    keys: list[bytes]
    """Keys of pages, hashes of blocks first; see `PageKeys`."""
    num_blocks: int
    """Number of hashes."""
    blocks: list[int]
    """Pages that are loaded, one for each key."""
    give_up_at: float
    is_given_up: bool = False

    @property
    def parent(self) -> bytes:
        """Hash of the block before the first one, or empty."""
        return self.prefix[-1] if self.prefix else b""


class BlockLoads:
    """Sources in order of preference, and the loads that are on their way."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        sources: Sequence[BlockSource],
        clock: Callable[[], float],
        compute_seconds: Callable[[], float] = lambda: 0.0,
        keys: PageKeys = ONE_GROUP,
    ) -> None:
        """`compute_seconds` says how long the tokens of a block take to compute; 0 where that is
        not known."""
        self.num_decoding: Callable[[], int] = lambda: 0
        """Number of requests that wait while a prompt is computed."""
        self._pool = pool
        self._cache = cache
        self._keys = keys
        self._clock = clock
        self._compute_seconds = compute_seconds
        self._sources = tuple(sources)
        self._keepers = tuple(source for source in sources if source.keeps_blocks)
        self._is_asked = False
        """Whether a source was asked for something since the last launch."""
        self._are_saves_due = False
        """Whether a source was offered blocks since the last launch."""
        self._open: dict[Ticket, _Load] = {}
        self._loading: dict[bytes, Ticket] = {}
        """Loads in flight, by hash of each block that requests can wait for, and by keys of other
        pages."""
        # Looked up for each block that is cached or evicted.
        if parts := [source.held for source in sources if source.held is not NOT_OURS]:
            pool.elsewhere = parts[0] if len(parts) == 1 else _Union(parts)
        for source in self._sources:
            source.connect(cache.note_lost, cache.note_gained)

    @property
    def keeps_blocks(self) -> bool:
        """Whether a source copies blocks that leave the device."""
        return bool(self._keepers)

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    @property
    def is_any_open(self) -> bool:
        return bool(self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the load has not ended. A cancelled load is open until its source has released
        its blocks."""
        return ticket in self._open

    @property
    def has_background_work(self) -> bool:
        return any(source.has_background_work for source in self._sources)

    def release(
        self, blocks: Sequence[int], hashes: Sequence[bytes], owner: Owner, parent: bytes = b""
    ) -> None:
        """Releases blocks that were not held for a turn, in order of their chain: the first have
        these hashes and follow `parent`. Sources may copy those that no request uses now."""
        parents = [parent, *map(block_of, hashes)]
        self._release(blocks, hashes, parents, owner, moved(owner.tenant))

    def release_part(self, chain: HashChain, kind: int, held: HeldPages, part: str = "") -> None:
        """Like `release`, for pages of one kind of a chain's blocks. `part`: class of pages whose
        return times differ; empty: that of the chain."""
        start = held.first * self._keys.pages_of_block(kind)
        turn = chain.turn.part(part) if part else chain.turn
        self._pool.release(held.pages, turn=turn, start=start)
        if not self._keepers:
            return
        parent = chain.parent_of(held.first) if chain.hashes else b""
        hashes = chain.hashes[held.first :]
        given = GivenBack(turn, start)
        self._save(held.pages, *self._keys.of(kind, hashes, held, parent), chain.owner, given)

    def release_set(
        self, chain: HashChain, num_blocks: int, pages: Sequence[int], *, is_early: bool
    ) -> None:
        """Like `release`, of the pages of the state set behind so many of a chain's blocks.
        `is_early`: see `BlockPool.release`."""
        # With the class of its blocks, so that both are evicted at about the same time.
        turn = chain.turn.part(chain.turn.kind)
        self._pool.release(pages, turn=turn, start=num_blocks - 1, is_early=is_early)
        if not self._keepers:
            return
        keys = self._keys.of_set(chain.hashes[num_blocks - 1])
        parents = [chain.parent_of(num_blocks - 1)] * len(keys)
        self._save(pages, keys, parents, chain.owner, GivenBack(turn, num_blocks - 1))

    def _release(
        self,
        pages: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        owner: Owner,
        turn: Turn,
        start: int = 0,
    ) -> None:
        """Releases pages that a transfer held; the first has index `start` in its chain. Sources
        may copy the leading ones, which have keys, that no request uses now."""
        self._pool.release(pages, turn=turn, start=start, is_move=True)
        if self._keepers:
            self._save(pages, keys, parents, owner, GivenBack(turn, start, is_move=True))

    def _save(
        self,
        pages: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack,
    ) -> None:
        """Lets sources copy the leading pages, which have keys, that no request uses now. `given`
        has the index of the first."""
        are_unheld = self._pool.are_unheld(pages, keys)
        if True not in are_unheld:
            return
        kept = list(compress(keys, are_unheld))
        unused = list(compress(pages, are_unheld))
        kept_parents = list(compress(parents, are_unheld))
        first_unheld = are_unheld.index(True)
        given = replace(given, start=given.start + first_unheld)
        self._is_asked = self._are_saves_due = True
        for source in self._keepers:
            source.save(kept, unused, kept_parents, owner, given)

    def find(
        self,
        chain: HashChain,
        start: int,
        end: int,
        excluded: Collection[Loader] = (),
        num_here: int = 0,
    ) -> Offer | None:
        """Best offer of blocks of the chain from `start` up to `end`, or up to the first that is on
        its way: that of the source that saves most time. While the time of computing them is
        unknown, the source with most blocks wins, then the cheapest, then the first. None where no
        source has any, or where computing them takes less time. `num_here`: see `Offer`."""
        hashes = chain.hashes[start:end] if self._sources else []
        if self._loading:
            hashes = list(takewhile(lambda block_hash: block_hash not in self._loading, hashes))
        num_here = min(num_here, len(hashes))
        best = None
        most = (0.0, 0.0)
        for source in self._sources if hashes else ():
            if source in excluded:
                continue
            if not (num_blocks := self._keys.num_found(source, hashes, num_here)):
                continue
            cost = source.cost(len(self._keys.to_load(hashes[:num_blocks], num_here)))
            compute_seconds = self._compute_seconds()
            num_waiting = 1 + (self.num_decoding() if source.spares_steps else 0)
            saved = num_blocks * compute_seconds * num_waiting - cost
            if compute_seconds and saved < 0:
                continue
            worth = (saved, 0.0) if compute_seconds else (num_blocks, -cost)
            if best is None or worth > most:
                best = Offer(source, num_blocks, cost, min(num_here, num_blocks))
                most = worth
        return best

    def load(self, offer: Offer, chain: HashChain, hits: Hits) -> Ticket:
        """Asks for the chain's blocks after `hits`, which are the offer's, as far as they are not
        cached. They are loaded into blocks that are allocated now."""
        start = hits.num_blocks
        hashes = chain.hashes[start : start + offer.num_blocks]
        num_here = offer.num_here
        here = self._pool.find_leading(self._keys.of_blocks(hashes[:num_here]))
        # First: these blocks may be free, and the next allocation could take them.
        self._pool.share(hits.pages)
        self._pool.share(here, is_move=True)
        keys = self._keys.to_load(hashes, num_here)
        return self._begin(offer, chain, start + num_here, keys, hits, here)

    def load_early(
        self, source: Loader, chain: HashChain, start: int, num_blocks: int, num_pages: int
    ) -> Ticket | None:
        """Like `load`, for up to `num_blocks` of the chain's blocks from `start` on that are not in
        flight yet, and at most `num_pages` pages. Blocks before them may be evicted meanwhile.
        Pages that only the next position needs arrive with its last block or after it. None: there
        is nothing to load, or no free page."""
        num_blocks = min(num_blocks, max(0, num_pages) // self._keys.num_lasting)
        end = start + num_blocks
        keys = self._keys.of_blocks(chain.hashes[start:end])
        if end == len(chain.hashes):
            at_end = self.missing_at_end(chain)
            keys += at_end if len(keys) + len(at_end) <= num_pages else []
        if not keys:
            return None
        offer = Offer(source, num_blocks, source.cost(len(keys)))
        return self._begin(offer, chain, start, keys)

    def missing_at_end(self, chain: HashChain) -> list[bytes]:
        """Keys of pages that are needed only by the position after a chain's blocks, and that are
        neither cached nor in flight."""
        keys = self._keys.of_end(chain.hashes)
        return [key for key in keys if self._pool.find(key) is None and key not in self._loading]

    def give_up(self, ticket: Ticket) -> None:
        """Gives up an open load with the next poll."""
        assert ticket in self._open
        self._open[ticket].give_up_at = -math.inf

    def _begin(
        self,
        offer: Offer,
        chain: HashChain,
        start: int,
        keys: list[bytes],
        held: Hits = NO_HITS,
        here: Sequence[int] = (),
    ) -> Ticket:
        if self._are_saves_due:
            # Several sources may have been asked to copy the contents of these blocks. All copies
            # of a source precede its loads, so that no load overwrites a block which another source
            # has yet to copy.
            self.launch()
        blocks = self._pool.allocate(len(keys))
        ticket = offer.source.load(keys, blocks)
        self._is_asked = True
        self._loading |= dict.fromkeys(keys, ticket)
        self._open[ticket] = _Load(
            source=offer.source,
            owner=chain.owner,
            turn=chain.moved_turn,
            prefix=chain.hashes[:start],
            held=held,
            here=list(here),
            keys=keys,
            num_blocks=num_blocks_of(keys),
            blocks=blocks,
            give_up_at=self._clock() + max(MIN_PATIENCE_SECONDS, PATIENCE * offer.cost),
        )
        return ticket

    def ticket_at_end(
        self, hashes: Sequence[bytes], excluded: Collection[Loader] = ()
    ) -> Ticket | None:
        """The load in flight that brings a page needed only by the position after these blocks; see
        `ticket`."""
        found = (self.ticket(key, excluded) for key in self._keys.of_end(hashes))
        return next((each for each in found if each is not None), None)

    def ticket(self, block_hash: bytes, excluded: Collection[Loader] = ()) -> Ticket | None:
        """The load in flight that brings this block from a source that is not excluded."""
        ticket = self._loading.get(block_hash)
        return ticket if ticket is not None and self._open[ticket].source not in excluded else None

    def launch(self) -> None:
        """Starts requested loads, and continues open ones."""
        if self._is_asked or self._open:
            self._is_asked = self._are_saves_due = False
            for source in self._sources:
                source.launch()

    def poll(self) -> list[SettledLoad]:
        """Loads that ended or were cancelled since the last call; cancelled ones are returned again
        when they end. Loaded blocks are cached, and the other blocks of ended loads are free."""
        settled: list[SettledLoad] = []
        for source in self._sources:
            for end in source.poll():
                settled.append(self._end(end))
        if self._open:
            settled += self._give_up_late()
        return settled

    def close(self) -> None:
        """Cancels open loads. No source writes to the KV cache after this."""
        for ticket, load in self._open.items():
            load.source.cancel(ticket)
        for source in self._sources:
            source.close()

    def _end(self, end: LoadEnd) -> SettledLoad:
        load = self._open.pop(end.ticket)
        num_usable = 0
        if not load.is_given_up:
            num_usable = end.num_usable
            self._forget(load)
            self._adopt(load, num_usable)
        num_pages = len(load.blocks) // max(1, load.num_blocks)
        start = len(load.prefix) * num_pages
        self._pool.release(load.blocks, turn=load.turn, start=start, is_move=True)
        if load.here:
            first = load.held.num_blocks
            before = load.prefix[first - 1] if first else b""
            keys = self._keys.of_blocks(load.prefix[first:])[: len(load.here)]
            start = first * self._keys.pages_of_block(0)
            parents = [before, *map(block_of, keys[:-1])]
            self._release(load.here, keys, parents, load.owner, load.turn, start)
        for kind, held in enumerate(load.held.held):
            before = load.prefix[held.first - 1] if held.first else b""
            hashes = load.prefix[held.first :]
            keys, parents = self._keys.of(kind, hashes, held, before)
            start = held.first * self._keys.pages_of_block(kind)
            self._release(held.pages, keys, parents, load.owner, load.turn, start)
        failed = None if num_usable == len(load.blocks) else load.source
        num_loaded = min(num_usable, load.num_blocks)
        return SettledLoad(end.ticket, failed, load.source.tier, num_loaded)

    def _adopt(self, load: _Load, num_usable: int) -> None:
        """Caches the first pages of a load."""
        num_first = min(num_usable, load.num_blocks)
        self._cache.adopt(load.parent, load.keys[:num_first], load.blocks[:num_first])
        self._cache.adopt_others(load.keys[num_first:num_usable], load.blocks[num_first:num_usable])

    def _give_up_late(self) -> Iterator[SettledLoad]:
        """Cancels loads that take far longer than their source predicted. Their blocks stay pinned
        until they have ended."""
        now = self._clock()
        for ticket, load in self._open.items():
            if now >= load.give_up_at and not load.is_given_up:
                load.is_given_up = True
                self._forget(load)
                load.source.cancel(ticket)
                yield SettledLoad(ticket, load.source, load.source.tier)

    def _forget(self, load: _Load) -> None:
        for key in load.keys:
            # Two loads may bring the same page of a window.
            self._loading.pop(key, None)


class _Union:
    """Hashes that any of several sources holds."""

    def __init__(self, parts: Sequence[Collection[bytes]]) -> None:
        self._parts = parts

    def __contains__(self, block_hash: object) -> bool:
        return any(block_hash in part for part in self._parts)

    def __iter__(self) -> Iterator[bytes]:
        return iter(set().union(*self._parts))

    def __len__(self) -> int:
        return len(set().union(*self._parts))
