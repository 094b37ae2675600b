"""Blocks between the prefix cache and block sources: picks a source for a prefix, and holds its
blocks until they are loaded.

Knows hash chains, the block pool and sources; knows nothing about requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, takewhile
from typing import NamedTuple

from ..page_groups import FULL
from .block_pool import BlockPool
from .block_source import NOT_OURS, BlockSource, LoadEnd, Loader, Owner, Ticket
from .page_keys import PageKeys
from .prefix_cache import NO_HITS, HashChain, HeldPages, Hits, PrefixCache
from .value.turn import Turn, moved

ONE_GROUP = PageKeys((FULL,), 1)
MIN_PATIENCE_SECONDS = 30.0
PATIENCE = 10
"""A load is given up after so many times the seconds that its source said it would take."""


class Offer(NamedTuple):
    """Blocks of a chain that a source has, and their cost in seconds."""

    source: Loader
    num_blocks: int
    cost: float


@dataclass(frozen=True, slots=True)
class SettledLoad:
    """A load for which requests need not wait any longer."""

    ticket: Ticket
    failed_source: Loader | None
    """The source, where some of the blocks that were asked of it are not cached."""
    tier: str = field(default="", compare=False)
    num_loaded: int = field(default=0, compare=False)
    """Leading blocks of the ticket that came."""


@dataclass(slots=True, kw_only=True)
class _Load:
    source: Loader
    owner: Owner
    turn: Turn
    """Turn of the chain that waits for the blocks."""
    prefix: list[bytes]
    """Hashes of the chain's blocks before the first one."""
    held: Hits
    """The chain's cached blocks before them, which must not be evicted meanwhile."""
    hashes: list[bytes]
    blocks: list[int]
    """Pages of these blocks; see `PageKeys.to_load`."""
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
        """Requests that wait while a prompt is computed."""
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
        """Keyed by hash of each block on its way that requests can wait for."""
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
    def is_any_open(self) -> bool:
        return bool(self._open)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, ticket: Ticket) -> bool:
        """Whether the load has not ended. One that was given up is open until its source has let go
        of its blocks."""
        return ticket in self._open

    @property
    def has_background_work(self) -> bool:
        return any(source.has_background_work for source in self._sources)

    def release(
        self, blocks: Sequence[int], hashes: Sequence[bytes], owner: Owner, parent: bytes = b""
    ) -> None:
        """Lets go of blocks that were held for no turn, given from first to last, the first of
        which have these hashes and follow `parent`; sources may copy those that no request uses
        now."""
        self._release(blocks, hashes, [parent, *hashes], owner, moved(owner.tenant))

    def release_part(self, chain: HashChain, kind: int, held: HeldPages, part: str = "") -> None:
        """Like `release`, for pages of a kind of a chain's blocks. `part`: kind of turn of pages
        that do not come back as others do; empty: that of the chain."""
        start = held.first * self._keys.pages_of_block(kind)
        turn = chain.turn.part(part) if part else chain.turn
        self._pool.release(held.pages, turn=turn, start=start)
        if not self._keepers:
            return
        parent = chain.parent_of(held.first) if chain.hashes else b""
        hashes = chain.hashes[held.first :]
        self._save(held.pages, *self._keys.of(kind, hashes, held, parent), chain.owner)

    def release_set(self, chain: HashChain, num_blocks: int, pages: Sequence[int]) -> None:
        """Like `release`, of the pages of the state set behind so many of a chain's blocks."""
        # With the kind of its blocks, so that both leave at about the same time.
        turn = chain.turn.part(chain.turn.kind)
        self._pool.release(pages, turn=turn, start=num_blocks - 1)
        if not self._keepers:
            return
        keys = self._keys.of_set(chain.hashes[num_blocks - 1])
        parents = [chain.parent_of(num_blocks - 1)] * len(keys)
        self._save(pages, keys, parents, chain.owner)

    def _release(
        self,
        pages: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        owner: Owner,
        turn: Turn,
        start: int = 0,
    ) -> None:
        """Lets go of pages that a move held, the first of which has the index `start`; sources may
        copy those of the first, which have keys, that no request uses now."""
        self._pool.release(pages, turn=turn, start=start, is_move=True)
        if self._keepers:
            self._save(pages, keys, parents, owner)

    def _save(
        self,
        pages: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        owner: Owner,
    ) -> None:
        """Lets sources copy those of the first pages, which have keys, that no request uses
        now."""
        are_unheld = self._pool.are_unheld(pages, keys)
        if True not in are_unheld:
            return
        kept = list(compress(keys, are_unheld))
        unused = list(compress(pages, are_unheld))
        kept_parents = list(compress(parents, are_unheld))
        self._is_asked = self._are_saves_due = True
        for source in self._keepers:
            source.save(kept, unused, kept_parents, owner)

    def find(
        self, chain: HashChain, start: int, end: int, excluded: Collection[Loader] = ()
    ) -> Offer | None:
        """The offer of the source that saves most time, of the chain's blocks from `start` on, up
        to `end` or the first that is on its way already. Where it is not known how long they take
        to compute: of the source that has most of them, then of the cheapest. Of equals the first.
        None where no source has any, or where computing them takes less time."""
        hashes = chain.hashes[start:end] if self._sources else []
        if self._loading:
            hashes = list(takewhile(lambda block_hash: block_hash not in self._loading, hashes))
        best = None
        most = (0.0, 0.0)
        for source in self._sources if hashes else ():
            if source in excluded or not (num_blocks := self._keys.num_found(source, hashes)):
                continue
            cost = source.cost(len(self._keys.to_load(hashes[:num_blocks])))
            compute_seconds = self._compute_seconds()
            num_waiting = 1 + (self.num_decoding() if source.spares_steps else 0)
            saved = num_blocks * compute_seconds * num_waiting - cost
            if compute_seconds and saved < 0:
                continue
            worth = (saved, 0.0) if compute_seconds else (num_blocks, -cost)
            if best is None or worth > most:
                best = Offer(source, num_blocks, cost)
                most = worth
        return best

    def load(self, offer: Offer, chain: HashChain, hits: Hits) -> Ticket:
        """Asks for the chain's blocks behind `hits`, which are the offer's. They come into the
        cache in blocks that are taken from the pool now."""
        # Before others are taken: these may be free.
        self._pool.share(hits.pages)
        return self._begin(offer, chain, hits.num_blocks, hits)

    def load_unheld(self, offer: Offer, chain: HashChain, start: int) -> Ticket:
        """Like `load`, for the chain's blocks from `start` on that are not on their way already.
        Those before them may be evicted meanwhile."""
        return self._begin(offer, chain, start, held=NO_HITS)

    def give_up(self, ticket: Ticket) -> None:
        """Gives up an open load with the next poll."""
        assert ticket in self._open
        self._open[ticket].give_up_at = -math.inf

    def _begin(self, offer: Offer, chain: HashChain, start: int, held: Hits) -> Ticket:
        hashes = chain.hashes[start : start + offer.num_blocks]
        if self._are_saves_due:
            # Several sources may have been asked to copy what these blocks contain. Each launches
            # its copies and its loads together, so that one would load into a block which the next
            # has yet to copy.
            self.launch()
        keys = self._keys.to_load(hashes)
        blocks = self._pool.allocate(len(keys))
        ticket = offer.source.load(keys, blocks)
        self._is_asked = True
        self._loading |= dict.fromkeys(hashes, ticket)
        self._open[ticket] = _Load(
            source=offer.source,
            owner=chain.owner,
            turn=chain.moved_turn,
            prefix=chain.hashes[:start],
            held=held,
            hashes=hashes,
            blocks=blocks,
            give_up_at=self._clock() + max(MIN_PATIENCE_SECONDS, PATIENCE * offer.cost),
        )
        return ticket

    def ticket(self, block_hash: bytes, excluded: Collection[Loader] = ()) -> Ticket | None:
        """The load that brings this block, if one from a source that is not excluded does."""
        ticket = self._loading.get(block_hash)
        return ticket if ticket is not None and self._open[ticket].source not in excluded else None

    def launch(self) -> None:
        """Starts requested loads, and continues open ones."""
        if self._is_asked or self._open:
            self._is_asked = self._are_saves_due = False
            for source in self._sources:
                source.launch()

    def poll(self) -> list[SettledLoad]:
        """Loads that ended or were given up since the last call; those that were given up are named
        again when they end. What was loaded can be hit, and the other blocks of loads that ended
        are free."""
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
        num_pages = len(load.blocks) // len(load.hashes)
        start = len(load.prefix) * num_pages
        self._pool.release(load.blocks, turn=load.turn, start=start, is_move=True)
        for kind, held in enumerate(load.held.held):
            before = load.prefix[held.first - 1] if held.first else b""
            hashes = load.prefix[held.first :]
            keys, parents = self._keys.of(kind, hashes, held, before)
            start = held.first * self._keys.pages_of_block(kind)
            self._release(held.pages, keys, parents, load.owner, load.turn, start)
        failed = None if num_usable == len(load.blocks) else load.source
        num_loaded = min(num_usable, len(load.hashes))
        return SettledLoad(end.ticket, failed, load.source.tier, num_loaded)

    def _adopt(self, load: _Load, num_usable: int) -> None:
        """Caches the first pages of a load."""
        num_first = min(num_usable, len(load.hashes))
        self._cache.adopt(load.parent, load.hashes[:num_first], load.blocks[:num_first])
        keys = self._keys.to_load(load.hashes)
        self._cache.adopt_others(keys[num_first:num_usable], load.blocks[num_first:num_usable])

    def _give_up_late(self) -> Iterator[SettledLoad]:
        """Cancels loads that take far longer than their source said. Their blocks stay held until
        they have ended."""
        now = self._clock()
        for ticket, load in self._open.items():
            if now >= load.give_up_at and not load.is_given_up:
                load.is_given_up = True
                self._forget(load)
                load.source.cancel(ticket)
                yield SettledLoad(ticket, load.source, load.source.tier)

    def _forget(self, load: _Load) -> None:
        for block_hash in load.hashes:
            del self._loading[block_hash]


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
