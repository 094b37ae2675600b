"""KV blocks of requests: which they have, which they find cached, and which a source loads. Free
ones are counted in pages, of which a block has one for each page group.

Decides nothing over requests: it answers what one lacks or would wait for, and takes and gives back
blocks. Knows nothing about seats, tenants and steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array
from ...kv.block_loads import BlockLoads, SettledLoad
from ...kv.block_source import BlockSource, Loader, Ticket
from ...kv.lending import Steps
from ...kv.page_pool import PagePool
from ...kv.peer_blocks import PeerBlocks
from ...kv.prefetch import NewPrefetch
from ...kv.prefix_cache import PrefixCache
from ...kv.tiers import Tiers
from ...request import Holder
from ...step_output import CacheEvents, EngineLoad, StoredChain
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .block_table import BlockTable
from .forks import Follow, Forks, PartialBlock
from .prefetched_blocks import PrefetchedBlocks
from .prefetches import Needs, Prefetches
from .prefix_hits import PrefixHits
from .wanted import Wanted

UNSEEN = "unseen"
"""Kind of turn of pages that no layer of a running sequence sees any more."""
PREEMPTED = "preempted"
"""Kind of turn of requests that gave up their blocks, and come back for them."""
CANCELLED = "cancelled"
"""Kind of turn of prompts whose answers were cancelled."""
EVERY_TOKEN = 1 << 40
"""Tokens of no sequence: more than any has."""
Wait = Follow | Ticket
"""An event that a request waits for whose next blocks are on their way."""


class Blocks:
    are_hit_at_once = True
    """Whether blocks that a step computes are cache hits for requests that join the same step."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        tiers: Tiers,
        sources: Sequence[BlockSource],
        *,
        prefill_seconds: Callable[[], float],
        num_decoding: Callable[[], int],
        copies_blocks: bool,
    ) -> None:
        """`sources` are asked after the tiers; `prefill_seconds`: time in which a prompt token is
        computed, 0 where it is not known; `num_decoding`: requests that wait while a prompt is
        computed."""
        self._block_size = config.block_size
        self._kinds = config.page_kinds
        self._sizes = config.page_sizes
        # The first kind, of layers that see all, decides which blocks of a chain are missing.
        self._continues_late = len(config.blocks_seen) > 1 and not config.blocks_seen[0]
        """Whether a chain's cached blocks may lack what continues it."""
        self._is_caching = config.enable_prefix_caching
        self._clock = clock
        self._pool = PagePool(config)
        self._cache = self._new_cache(config)
        self._loads = BlockLoads(
            self._pool,
            self._cache,
            [*tiers.sources, *sources],
            clock,
            lambda: prefill_seconds() * config.block_size,
            self._pool.keys,
        )
        self._loads.num_decoding = num_decoding
        self._table = BlockTable(config)
        # Pages by page group, and those of a block's state set after them.
        num_pages = config.num_page_groups + config.state_pages
        prefetched = PrefetchedBlocks(self._pool, config.block_size)
        self._hits = PrefixHits(self._cache, prefetched, clock)
        self._forks = Forks(
            self._pool, self._pages_at, config.block_size, num_pages, is_on=copies_blocks
        )
        self._peers: PeerBlocks | None = tiers.peers if self._is_caching else None
        self._prefetches = Prefetches(self._peers, self._pool, self._loads, prefetched, clock)

    def _new_cache(self, config: EngineConfig) -> PrefixCache:
        return PrefixCache(self._pool, self._kinds, config.block_size)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    def num_needed(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most."""
        return self._pool.num_held(num_tokens)

    def num_growing(self, num_rows: int) -> int:
        """Pages that are left for so many running rows to grow into."""
        return self.num_pages_of_blocks(num_rows)

    def num_pages_of_blocks(self, num_blocks: int) -> int:
        """Pages of so many blocks that every layer sees."""
        return num_blocks * self._pool.num_groups

    def expect(self, request: RequestState, holder: Holder) -> None:
        """Notes that another engine may hold the first blocks of a request."""
        if self._peers is not None:
            self.hash(request)
            hashes = request.chain.hashes[: holder.num_tokens // self._block_size]
            self._peers.expect(self._pool.keys.to_load(hashes), request.chain.owner, holder)

    def hash(self, request: RequestState) -> None:
        """Hashes the full blocks of a request's known tokens."""
        if self._is_caching:
            request.chain.cover(request.token_ids, self._block_size)

    def num_uncached_tokens(self, request: RequestState) -> int:
        """Known tokens that neither the cache nor a source has."""
        max_hits = request.num_cacheable_blocks(self._block_size)
        num_hits = self._cache.match(request.chain, max_hits).num_blocks
        num_here = self._num_here(request, num_hits, max_hits)
        offer = self._loads.find(request.chain, num_hits, max_hits, num_here=num_here)
        if offer is not None:
            num_hits += offer.num_blocks
        return request.num_tokens - num_hits * self._block_size

    def _num_here(self, request: RequestState, num_hits: int, max_hits: int) -> int:
        """Number of cached blocks after a request's hits that cannot be used, since pages of other
        kinds of layers that its next position needs are missing."""
        if not self._continues_late or not self._loads.has_sources:
            return 0
        return self._cache.num_leading(request.chain, max_hits) - num_hits

    def wanted(self, request: RequestState) -> Wanted:
        max_hits = request.num_cacheable_blocks(self._block_size)
        hits = self._cache.match(request.chain, max_hits)
        return Wanted(
            hits, max_hits, request.num_tokens, self._pool.num_new(hits, request.num_tokens)
        )

    def num_taken(self, wanted: Wanted) -> int:
        """Free pages that the request would take."""
        num_unheld = self._pool.count_unheld(wanted.hits.pages)
        return self._pool.num_pages(wanted.num_new) + num_unheld

    def eviction_loss(self, request: RequestState, wanted: Wanted) -> float:
        """Tokens that other requests are expected to compute again if this request is given its
        blocks now; 0 where another tier keeps copies of evicted blocks."""
        if self._loads.keeps_blocks:
            return 0.0
        self._pool.note_time(self._clock())
        num_pages = self._pool.num_pages(wanted.num_new)
        loss = self._pool.eviction_loss(request.tenant, num_pages)
        return loss / max(1, self._pool.num_groups) * self._block_size

    def wait_of(
        self, request: RequestState, wanted: Wanted, prefilling: Iterable[RequestState]
    ) -> Wait | None:
        """The event that the request should wait for: a request of `prefilling` computes its next
        block, or a source loads it; None: no reason to wait."""
        num_hits = wanted.hits.num_blocks
        if num_hits < wanted.max_hits:
            missed = request.chain.hashes[num_hits]
            for leader in prefilling:
                hashes = leader.chain.hashes
                if leader.chain.num_cached <= num_hits < len(hashes) and hashes[num_hits] == missed:
                    return Follow(
                        leader, min(wanted.max_hits, request.chain.num_shared(leader.chain))
                    )
            if (ticket := self._ticket_of(request, missed, wanted)) is not None:
                self._hits.note_waits(request)
                return ticket
        return self._forks.wait_of(request, prefilling)

    def wait_of_leaving(
        self, request: RequestState, wanted: Wanted, leaving: Iterable[RequestState]
    ) -> Follow | None:
        """The request without a row among `leaving`, whose last steps are in flight, that leaves
        more hits when these have retired."""
        return None

    def _ticket_of(self, request: RequestState, missed: bytes, wanted: Wanted) -> Ticket | None:
        """The load in flight that brings the next block after a request's hits, or the missing
        pages of that block."""
        excluded = request.failed_sources
        ticket = self._loads.ticket(missed, excluded)
        if ticket is not None or not self._continues_late or not self._loads.is_any_open:
            return ticket
        hashes = request.chain.hashes[: wanted.max_hits]
        end = self._cache.num_leading(request.chain, wanted.max_hits)
        ticket = self._loads.ticket(hashes[end], excluded) if end < len(hashes) else None
        return ticket or self._loads.ticket_at_end(hashes[:end], excluded)

    def load(self, request: RequestState, wanted: Wanted) -> Ticket | None:
        """Asks a source for the blocks after the hits, if that is faster than computing them."""
        if not self._kinds:
            return None
        start = wanted.hits.num_blocks
        # Asks for as many as there is room for, and for the others when these have arrived. Without
        # hits the pages of the first kind decide: at most as many blocks of other kinds arrive as a
        # position needs.
        num_blocks = min(wanted.num_new) if start else wanted.num_new[0]
        end = min(wanted.max_hits, start + num_blocks)
        num_here = self._num_here(request, start, end)
        offer = self._loads.find(request.chain, start, end, request.failed_sources, num_here)
        if offer is None:
            return None
        self._hits.note_waits(request)
        return self._loads.load(offer, request.chain, wanted.hits)

    def note_loaded(self, request: RequestState, load: SettledLoad) -> None:
        """Notes that the wait of a request for this load is over."""
        self._hits.note_loaded(request, load.tier, load.num_loaded * self._block_size)

    def num_uncached_without(self, request: RequestState, source: Loader) -> int:
        """Number of known tokens to compute for a request whose source failed to load. The source
        is not asked again until the request has a row."""
        request.failed_sources += (source,)
        max_hits = request.num_cacheable_blocks(self._block_size)
        num_hits = self._cache.match(request.chain, max_hits).num_blocks
        return request.num_tokens - num_hits * self._block_size

    def reserve_partial(
        self, request: RequestState, wanted: Wanted, num_others: int, step: int
    ) -> PartialBlock:
        """The block that `step` copies for the tokens after the hits, beside `num_others` pages
        that are taken; see `Forks.take`."""
        return self._forks.take(request, wanted.hits.num_blocks, num_others, step)

    def seat(
        self, request: RequestState, wanted: Wanted, partial: PartialBlock
    ) -> tuple[Int32Array, list[int]]:
        """Allocates the blocks of a request's known tokens, as many as a row holds at once, and
        counts cached tokens as computed. Returns the columns of its pages, and the pages."""
        hits = wanted.hits
        request.seated_at = self._clock()
        self._pool.note_time(request.seated_at)
        self._pool.share(hits.pages)
        held = self._pool.longer(hits, wanted.num_new)
        request.chain.num_cached = hits.num_blocks
        request.num_computed = hits.num_blocks * self._block_size + partial.num_tokens
        request.failed_sources = ()
        self._hits.note_seated(request)
        columns = self._table.seat(request.row, held)
        return columns, [page for each in held for page in each.pages]

    def copies(
        self, request: RequestState, wanted: Wanted, partial: PartialBlock
    ) -> Iterable[tuple[int, int]]:
        """Pages to copy for a request that was seated, as (from, to): the block after its cached
        ones starts as a copy of `partial`."""
        if not partial.num_tokens:
            return ()
        begun = self._pages_at(request, request.chain.num_cached)
        return zip(partial.pages, begun, strict=True)

    def _pages_at(self, request: RequestState, idx: int) -> list[int]:
        """Pages of a block of a request's row, by page group."""
        return self._table.pages_at(request.row, idx)

    def note_computed(self, request: RequestState) -> tuple[list[StoredChain], list[bytes]]:
        """Makes the blocks filled by the request's computed tokens available as cache hits. Returns
        the chains that no other block caches, which are announced once they are computed, and the
        hashes of all."""
        if not self._is_caching:
            return [], []
        first = request.chain.num_cached
        num_full = request.num_computed // self._block_size
        pages, *others = self._table.by_group(request.row, first, num_full)
        stored = self._cache.offer(request.chain, pages, others)
        return stored, request.chain.hashes[first:num_full]

    def num_full(self, request: RequestState) -> int:
        """Number of blocks that the request's computed tokens fill."""
        return request.num_computed // self._block_size

    def start_decoding(self, request: RequestState) -> None:
        """Notes that all known tokens of a request are scheduled."""
        if self._is_caching:
            self._table.start_hashing(request.row, request.chain.num_cached)
        self._forks.note_whole(request)

    def full_rows(self, rows: RowIndices, num_computed: Int32Array) -> RowIndices:
        """Rows that need a block for their next token; num_computed [rows of the table]."""
        full: RowIndices = rows[num_computed[rows] == self._table.capacity[rows]]
        return full

    def room(self, rows: RowIndices, num_computed: Int32Array) -> Int32Array:
        """Number of tokens that each row's blocks can hold after its computed ones."""
        room: Int32Array = self._table.capacity[rows] - num_computed[rows]
        return room

    def num_to_grow(self, full_rows: RowIndices) -> int:
        """Pages that rows take which need a block for their next token."""
        return full_rows.size * self._pool.num_groups

    def num_growable(self, full_rows: RowIndices) -> int:
        """How many of these rows, the first ones, find their pages."""
        return self.num_free // self._pool.num_groups

    def may_grow(self, num_rows: int, num_others: int) -> bool:
        """Whether there are free blocks for `num_rows` rows now and for `num_others` rows later."""
        return self.num_pages_of_blocks(num_rows + num_others) <= self.num_free

    def chunk_end(self, request: RequestState, end: int) -> int:
        """Position at which a chunk of a prompt ends best: `end`, or an earlier one."""
        return end

    def extend(self, request: RequestState, num_tokens: int) -> tuple[Int32Array, list[int]]:
        """Allocates blocks for the next `num_tokens` tokens of a row, as far as blocks are free.
        Returns the columns of their pages, and the pages."""
        ends = self._table.ends(request.row)
        added = self._pool.extended(ends, self.num_needed(num_tokens))
        columns = self._table.extend(request.row, added)
        return columns, [page for each in added for page in each.pages]

    def num_lacking(self, request: RequestState, num_tokens: int) -> int:
        """Number of pages that a row lacks for `num_tokens` tokens."""
        ends = self._table.ends(request.row)
        return self._pool.num_lacking(ends, self.num_needed(num_tokens))

    def num_held_tokens(self, request: RequestState) -> int:
        """Number of tokens that the row's blocks have room for."""
        return int(self._table.capacity[request.row])

    def grow(self, rows: RowIndices) -> tuple[RowIndices, Int32Array, Int32Array]:
        """Gives each row one more block. Returns rows, columns and pages of their block tables,
        [entries] each."""
        num_groups = self._pool.num_groups
        pages = np.array(self._pool.allocate(rows.size * num_groups), np.int32)
        pages = pages.reshape(rows.size, num_groups)
        columns = self._table.append(rows, pages)
        return rows.repeat(num_groups), columns.reshape(-1), pages.reshape(-1)

    def shrink(self, rows: RowIndices, num_computed: Int32Array) -> bool:
        """Takes back blocks of rows behind their computed tokens. Whether there were any."""
        spare = rows[self._table.has_spare(rows, num_computed[rows])].tolist()
        for row in spare:
            self._pool.release(self._table.take_spare(row, int(num_computed[row])))
        return bool(spare)

    def cache_filled(self, rows: RowIndices, num_computed: Int32Array, table: RequestTable) -> None:
        """Caches the blocks that outputs of rows filled; num_computed [R]: tokens whose keys and
        values retired steps have computed, so that blocks are announced at once."""
        filled = rows[self._table.hash_due[rows] <= num_computed]
        if filled.size:
            (pages, *others), ends = self._table.take_filled(filled)
            token_ids = table.tokens_before(filled, ends, self._block_size)
            self._cache.append(table.chains_of(filled), token_ids, pages, others)

    def release_unseen(
        self, rows: RowIndices, num_computed: Int32Array, table: RequestTable
    ) -> bool:
        """Gives back the blocks of rows that no layer sees from position num_computed[i] on, before
        which retired steps have computed keys and values. Whether there were any."""
        has_released = False
        for idx, kind in enumerate(self._kinds):
            if not kind.window:
                continue
            ends = (num_computed + 1 - kind.window) // self._block_size
            due = ends > self._table.firsts[idx, rows]
            chains = table.chains_of(rows[due])
            for row, end, chain in zip(rows[due].tolist(), ends[due].tolist(), chains, strict=True):
                held = self._table.take_leading(row, idx, end)
                self._loads.release_part(chain, idx, held, UNSEEN)
            has_released |= bool(due.any())
        return has_released

    def num_pages_of(self, request: RequestState) -> int:
        """Number of pages of a request that holds a row."""
        return self._table.num_pages_of(request.row)

    def resume_seconds(self, request: RequestState, seconds_per_token: float) -> float:
        """Seconds that a preempted request would need to be where it is now: to load its blocks at
        the speed of recent loads, or to compute its tokens."""
        if self._loads.keeps_blocks and self._hits.seconds_per_token:
            seconds_per_token = min(seconds_per_token, self._hits.seconds_per_token)
        num_blocks = self._table.num_pages_of(request.row) / max(1, self._pool.num_groups)
        return num_blocks * self._block_size * seconds_per_token

    def num_returning(self, leaving: Iterable[RequestState]) -> int:
        """Pages that come free once these requests have left."""
        return self._pool.count_returning(
            page for request in leaving for page in self.pages_of(request.row)
        )

    def pages_of(self, row: int) -> list[int]:
        """Pages of a row, of all kinds of layers."""
        return self._table.pages_of(row)

    def release(self, request: RequestState) -> None:
        """Releases the blocks of a request whose row computes nothing more."""
        row = request.row
        self._pool.note_time(self._clock())
        part = "" if request.has_finished else PREEMPTED
        # A cancelled answer is continued by no prompt. Whether its prompt is continued is learnt
        # separately.
        is_cut = request.is_unwanted and self._pool.values is not None
        part = CANCELLED if is_cut else part
        end = (request.num_prompt_tokens if is_cut else EVERY_TOKEN) // self._block_size
        for kind, held in enumerate(self._table.held(row)):
            kept, answer = held.cut(end)
            if answer:
                self._pool.release(answer, is_early=True)
            self._loads.release_part(request.chain, kind, kept, part)
        self._table.vacate(row)

    def num_wasted_slots(self, num_known: Int32Array, is_alive: BoolArray) -> int:
        """KV slots of rows' blocks after their last known tokens."""
        return int(np.dot(self._table.capacity - num_known, is_alive))

    def begin_step(self) -> list[Follow]:
        """Notes that the next step is planned. Returns the requests that others need follow no
        longer."""
        return self._forks.begin_step()

    def retire(self, step: int) -> bool:
        """Releases blocks that steps up to this one have copied. Returns whether there were any."""
        return self._forks.retire(step)

    def launch(self) -> None:
        """Begins what sources were asked for, and goes on with open loads."""
        self._loads.launch()

    def poll(self) -> list[SettledLoad]:
        """Loads that ended, or were given up, since the last call."""
        return self._loads.poll()

    def drop_cached(self) -> None:
        """Empties the device's prefix cache, while no request and no load holds a block. Copies in
        other tiers stay."""
        assert self._pool.num_free == self._pool.num_usable
        self._pool.release(self._pool.allocate(self._pool.num_free))

    def close(self) -> None:
        """Ends open loads."""
        self._loads.close()

    @property
    def has_background_work(self) -> bool:
        """Whether blocks are being stored or found."""
        return self._loads.has_background_work

    @property
    def are_loading(self) -> bool:
        """Whether blocks are being loaded, or wait to be."""
        return self._loads.is_any_open or bool(self._prefetches)

    def is_load_awaited(self, needs: Needs) -> bool:
        """Whether a step is due as soon as an open load goes on; loads of prefetches have time."""
        if not self._loads.is_any_open:
            return False
        return self._loads.num_open > self._prefetches.num_loading or needs.awaits_any_load

    def open_leases(self, tiers: Tiers, steps: Steps) -> None:
        """Lets other engines copy blocks of this pool, if they can be reached."""
        tiers.open_leases(self._pool, self._loads.release, steps)

    def prefetch(self, new: NewPrefetch) -> None:
        self._prefetches.add(new)

    def end_prefetch(self, number: int) -> None:
        self._prefetches.end(number)

    def end_prefetches_of(self, request: RequestState) -> None:
        """Ends the prefetches of prompts that this request begins with."""
        self._prefetches.end_for(request.chain)

    def advance_prefetches(self, needs: Needs) -> None:
        self._prefetches.advance(needs)

    @property
    def prefetch_pause(self) -> float | None:
        """Seconds until a prefetch goes on; None where none is open."""
        return self._prefetches.idle_seconds

    def _pages_by_window(self) -> dict[str, int]:
        counts = self._table.num_pages_by_window()
        return {str(window): count for window, count in counts.items()}

    def _wasted_bytes(self, num_slots: int) -> dict[str, int]:
        """See `EngineLoad`; `num_slots`: of blocks of rows, behind the last tokens."""
        counts = self._table.num_pages_by_window()
        sizes = self._sizes
        return {
            str(kind.window): round(
                counts[kind.window] * sizes.padding(kind)
                + num_slots * sizes.of_slot(kind, self._block_size)
            )
            for kind in self._kinds
        }

    def kv_bytes_of(self, row: int) -> dict[str, int]:
        """Bytes of pages of a row by kind of layer, as in `EngineLoad`; empty: sizes are not
        known."""
        counts = (self._table.num_pages_of_kind(row, idx) for idx in range(len(self._kinds)))
        return self._sizes.by_kind(self._kinds, counts)

    def announce(self, stored: list[StoredChain]) -> None:
        """Lets chains that are computed now go out with the next events."""
        self._cache.announce(stored)

    def take_events(self) -> CacheEvents | None:
        return self._cache.take_events()

    @property
    def is_any_shared(self) -> bool:
        """Whether several requests hold a block."""
        return self._pool.num_shared > 0

    def cached_hashes(self) -> Iterator[bytes]:
        """Hashes of cached blocks, and marks of their pages that were announced."""
        yield from self._pool.cached_hashes()
        yield from self._cache.marks

    def describe(self, load: EngineLoad) -> None:
        # The pool counts pages of all groups; a block has one of each.
        num_groups = max(1, self._pool.num_groups)
        load.num_used_blocks = -(-self._pool.num_used // num_groups)
        load.num_total_blocks = self._pool.num_usable // num_groups
        if num_groups > 1:
            load.num_pages_by_window = self._pages_by_window()
        if self._sizes.page:
            load.wasted_bytes = self._wasted_bytes(load.num_wasted_slots)
            counts = self._table.num_pages_by_window()
            load.kv_bytes = self._sizes.by_kind(
                self._kinds, (counts[kind.window] for kind in self._kinds)
            )
        if self._pool.values is not None:
            self._pool.note_time(self._clock())
            load.num_kept_blocks = self._pool.values.num_kept // num_groups
            if not self._loads.keeps_blocks:
                load.eviction_cost = self._pool.eviction_cost
        load.num_copied_blocks = self._forks.num_copies
        load.prefix_queries = self._cache.num_queried_tokens
        load.prefix_hits = self._cache.num_hit_tokens
        load.hits_by_tier = dict(self._cache.num_hits_by_tier)
        load.seconds_per_hit_token = self._hits.seconds_per_token
        load.num_resumed_kept = self._hits.num_resumed_kept
        load.num_resumed_loaded = self._hits.num_resumed_loaded
        load.num_resumed_computed = self._hits.num_resumed_computed
        if load.peers is not None:
            load.peers.num_prefetched = self._prefetches.num_blocks * self._block_size
