"""KV blocks of requests beside states of their sequences, for models with state layers.

A pass reads the state set of the block in which it begins and writes that of the block after its
last token. A set is a snapshot once it is written: others begin with a copy of it. Snapshots stay
cached at the last border of a prompt and of an answer, where prompts part, and now and then in a
long one.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...config import EngineConfig
from ...executor import BoolArray, Int32Array
from ...kv.prefix_cache import HashChain
from ...kv.snapshots import SnapshotCache
from ...step_output import EngineLoad, StoredChain
from ..table.masks import RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from .blocks import Blocks, Wait
from .forks import Follow, PartialBlock
from .state_sets import StateSets, TakenSets
from .wanted import Wanted

MOST_ANSWER_BLOCKS = 256
"""Number of blocks before a snapshot that are searched for an earlier snapshot at the end of its
prompt."""
SNAPSHOT_SHARE = 1 / 8
"""Pages of snapshots that stay within a long prompt, by the pages of its keys and values."""


class _Growth(NamedTuple):
    """Blocks and state sets that rows need for their next token."""

    blocks: Int32Array
    """[R] block that each grows into."""
    lack_pages: BoolArray
    """[R] whether it lacks the block's keys and values."""
    lack_sets: BoolArray
    """[R] whether it lacks the block's state set."""


class StateBlocks(Blocks):
    are_hit_at_once = False

    def __init__(self, config: EngineConfig, *given: Any, **options: Any) -> None:
        """See `Blocks`."""
        super().__init__(config, *given, **options)
        self._states = StateSets(config, self._pool)
        self._async_depth = config.async_depth
        # A snapshot takes as many pages as these blocks have keys and values, times the share.
        num_pages = config.state_pages / (SNAPSHOT_SHARE * config.num_page_groups)
        self._interval = max(1, round(num_pages))
        """Blocks between snapshots of a long prompt."""
        self._last_kept: Int32Array = np.zeros(config.num_rows, np.int32)
        """Block of the row's last snapshot that stays."""
        self._begun: Int32Array = np.zeros(config.num_rows, np.int32)
        """Block of the snapshot with which the row's request was seated; 0: it had none."""
        self._stops: defaultdict[int, list[int]] = defaultdict(list)
        """Keyed by row, block borders at which chunks of its prompt end, in ascending order."""
        self._leaders: dict[bytes, RequestState] = {}
        """Keyed by hash of the block before it, what computes each snapshot of this step."""
        self._advanced: dict[int, RequestState] = {}
        """Requests with chunks of prompts in this step, by key."""

    def _new_cache(self, config: EngineConfig) -> SnapshotCache:
        self._snapshots = SnapshotCache(
            self._pool, self._kinds, config.block_size, config.state_pages
        )
        return self._snapshots

    def num_taken(self, wanted: Wanted) -> int:
        hits = wanted.hits
        num_sets = 1 + (wanted.num_tokens // self._block_size > hits.num_blocks)
        num_copied = self._pool.count_unheld(hits.snapshot)
        return super().num_taken(wanted) + num_sets * self._states.num_pages + num_copied

    def num_growing(self, num_rows: int) -> int:
        """Number of pages that rows may take, those of state sets included: with the most steps in
        flight, a row enters a block before it gives back the set of the one before."""
        num_sets = -(-num_rows * (self._async_depth + 1) // self._block_size)
        return super().num_growing(num_rows) + num_sets * self._states.num_pages

    def wait_of(
        self, request: RequestState, wanted: Wanted, prefilling: Iterable[RequestState]
    ) -> Wait | None:
        prefilling = list(prefilling)
        num_hits = wanted.hits.num_blocks
        hashes = request.chain.hashes[: wanted.max_hits]
        if self._leaders:
            for idx in range(len(hashes) - 1, num_hits - 1, -1):
                if (leader := self._leaders.get(hashes[idx])) is not None:
                    return Follow(leader, idx + 1)
        for leader in prefilling if num_hits < len(hashes) else ():
            others = leader.chain.hashes
            if num_hits < len(others) and others[num_hits] == hashes[num_hits]:
                num_shared = min(len(hashes), request.chain.num_shared(leader.chain))
                if leader.num_computed < num_shared * self._block_size:
                    self._stop_at(leader, num_shared)
                    return Follow(leader, num_shared)
        return super().wait_of(request, wanted, prefilling)

    def wait_of_leaving(
        self, request: RequestState, wanted: Wanted, leaving: Iterable[RequestState]
    ) -> Follow | None:
        """A turn of a conversation may come before the state at the end of the last answer can be
        found, and computes many blocks without it."""
        hashes = request.chain.hashes[: wanted.max_hits]
        for leader in leaving:
            num_shared = leader.chain.num_cached
            is_more = wanted.hits.num_blocks < num_shared <= len(hashes)
            if is_more and hashes[num_shared - 1] == leader.chain.hashes[num_shared - 1]:
                return Follow(leader, num_shared)
        return None

    def reserve_partial(
        self, request: RequestState, wanted: Wanted, num_others: int, step: int
    ) -> PartialBlock:
        partial = super().reserve_partial(request, wanted, num_others, step)
        if not partial.num_tokens:
            self._forks.hold(wanted.hits.snapshot, step, request.chain)
        return partial

    def seat(
        self, request: RequestState, wanted: Wanted, partial: PartialBlock
    ) -> tuple[Int32Array, list[int]]:
        columns, pages = super().seat(request, wanted, partial)
        row = request.row
        hits = wanted.hits
        set_columns, set_pages = self._states.add(row, hits.num_blocks)
        self._last_kept[row] = self._begun[row] = hits.num_blocks
        if hits.num_blocks:
            self._note_begun(request.chain.hashes[: hits.num_blocks])
        self._stops.pop(row, None)
        if hits.num_cached > hits.num_blocks:
            self._stop_at(request, hits.num_cached)
        if request.forks:
            # Choices of a request begin within the last block.
            self._stop_at(request, (request.num_tokens - 1) // self._block_size)
        return np.concatenate((columns, set_columns)), pages + set_pages

    def _note_begun(self, hashes: list[bytes]) -> None:
        """Notes that a chain continues from the snapshot after these blocks. The snapshot at the
        end of that chain's prompt is not read again if this one lies in the answer."""
        snapshots = self._snapshots.snapshots
        snapshots.note_read(hashes[-1])
        for block_hash in hashes[-2 : -2 - MOST_ANSWER_BLOCKS : -1]:
            if snapshots.find(block_hash):
                snapshots.supersede(block_hash, num_chains=0)
                return

    def copies(
        self, request: RequestState, wanted: Wanted, partial: PartialBlock
    ) -> Iterable[tuple[int, int]]:
        if partial.num_tokens or not wanted.hits.snapshot:
            return super().copies(request, wanted, partial)
        begun = self._states.of_block(request.row, wanted.hits.num_blocks)
        return zip(wanted.hits.snapshot, begun, strict=True)

    def _pages_at(self, request: RequestState, idx: int) -> list[int]:
        found = self._states.of_block(request.row, idx)
        return super()._pages_at(request, idx) + found if found else []

    def _stop_at(self, request: RequestState, num_blocks: int) -> None:
        """Lets a chunk of a request's prompt end behind so many blocks, if none has yet."""
        stops = self._stops[request.row]
        end = num_blocks * self._block_size
        if end > request.num_computed and end not in stops:
            insort(stops, end)

    def chunk_end(self, request: RequestState, end: int) -> int:
        stops = self._stops.get(request.row, ())
        idx = bisect_right(stops, request.num_computed)
        return min(end, stops[idx]) if idx < len(stops) else end

    def note_computed(self, request: RequestState) -> tuple[list[StoredChain], list[bytes]]:
        stored = super().note_computed(request)
        block = self.num_full(request)
        if self._is_caching:
            self._advanced[request.key] = request
            if block:
                self._offer(request, block)
        return stored

    def _offer(self, request: RequestState, block: int) -> None:
        """Lets the next steps find the state with which a chunk enters a block."""
        written = self._states.of_block(request.row, block)
        assert written
        block_hash = request.chain.hashes[block - 1]
        if not self._snapshots.snapshots.find(block_hash):
            self._snapshots.snapshots.cache(block_hash, written)
            self._snapshots.fresh.add(block_hash)
            self._leaders[block_hash] = request
        parts = block * self._block_size in self._stops.get(request.row, ())
        if parts:
            # Two chains: the one that was cached, and this one.
            self._snapshots.snapshots.note_read(block_hash, num_chains=2)
        is_kept = (
            parts
            or request.num_computed == request.num_tokens
            or block - self._last_kept[request.row] >= self._interval
        )
        if is_kept:
            self._states.keep(request.row, block)
            self._last_kept[request.row] = block
        if request.num_computed == request.num_tokens:
            begun = int(self._begun[request.row])
            if 0 < begun < block:
                # From here on the chain has a later snapshot.
                self._snapshots.snapshots.supersede(request.chain.hashes[begun - 1])
            if not parts and not request.forks:
                # The answer will end with a later snapshot, from which the next turn continues.
                self._snapshots.snapshots.supersede(block_hash, num_chains=0)

    def full_rows(self, rows: RowIndices, num_computed: Int32Array) -> RowIndices:
        full: RowIndices = rows[num_computed[rows] == self._capacity(rows)]
        return full

    def room(self, rows: RowIndices, num_computed: Int32Array) -> Int32Array:
        room: Int32Array = self._capacity(rows) - num_computed[rows]
        return room

    def _capacity(self, rows: RowIndices) -> Int32Array:
        """[R] tokens of rows that can be computed with their blocks and sets."""
        capacity: Int32Array = np.minimum(self._table.capacity[rows], self._states.capacity[rows])
        return capacity

    def _growth(self, rows: RowIndices) -> _Growth:
        """Number of blocks and state sets that rows without room need. A row that enters a block is
        given the pages of its keys and values together with its state set, one token before it
        needs them."""
        blocks = (self._capacity(rows) + 1) // self._block_size
        ends = (blocks + 1) * self._block_size
        lack_pages = self._table.capacity[rows] < ends
        return _Growth(blocks, lack_pages, self._states.capacity[rows] < ends - 1)

    def num_to_grow(self, full_rows: RowIndices) -> int:
        return int(self._costs(full_rows).sum()) if full_rows.size else 0

    def num_growable(self, full_rows: RowIndices) -> int:
        return int((self._costs(full_rows).cumsum() <= self.num_free).sum())

    def _costs(self, rows: RowIndices) -> Int32Array:
        """[R] pages that rows without room take."""
        growth = self._growth(rows)
        costs: Int32Array = (
            growth.lack_pages * self._pool.num_groups + growth.lack_sets * self._states.num_pages
        )
        return costs

    def may_grow(self, num_rows: int, num_others: int) -> bool:
        num_pages = num_rows * (self._pool.num_groups + self._states.num_pages)
        return num_pages + self.num_growing(num_others) <= self.num_free

    def grow(self, rows: RowIndices) -> tuple[RowIndices, Int32Array, Int32Array]:
        growth = self._growth(rows)
        grown, columns, pages = super().grow(rows[growth.lack_pages])
        entering = rows[growth.lack_sets]
        if not entering.size:
            return grown, columns, pages
        added, values = self._states.add_each(entering, growth.blocks[growth.lack_sets])
        return (
            np.concatenate((grown, np.repeat(entering, added.shape[1]))),
            np.concatenate((columns, added.reshape(-1))),
            np.concatenate((pages, values.reshape(-1))),
        )

    def extend(self, request: RequestState, num_tokens: int) -> tuple[Int32Array, list[int]]:
        row = request.row
        num_tokens = min(num_tokens, self._reach(row, num_tokens))
        columns, pages = super().extend(request, num_tokens)
        if num_tokens <= self._states.capacity[row]:
            return columns, pages
        set_columns, set_pages = self._states.add(row, num_tokens // self._block_size)
        return np.concatenate((columns, set_columns)), pages + set_pages

    def _reach(self, row: int, num_tokens: int) -> int:
        """Number of a row's tokens, `num_tokens` or a few more, for which pages are free: for
        blocks and the state set after them, or for blocks up to the end of its newest set. A row
        without progress takes no pages, since a step without tokens is not planned."""
        capacity = int(self._states.capacity[row])
        ends = self._table.ends(row)
        end = self.num_needed(num_tokens)
        while end * self._block_size > capacity:
            if self._pool.num_lacking(ends, end) + self._states.num_pages <= self.num_free:
                return end * self._block_size
            end -= 1
        return capacity

    def num_lacking(self, request: RequestState, num_tokens: int) -> int:
        num_lacking = super().num_lacking(request, num_tokens)
        if num_tokens > self._states.capacity[request.row]:
            num_lacking += self._states.num_pages
        return num_lacking

    def num_held_tokens(self, request: RequestState) -> int:
        held = super().num_held_tokens(request)
        return min(held, int(self._states.capacity[request.row]))

    def shrink(self, rows: RowIndices, num_computed: Int32Array) -> bool:
        has_released = super().shrink(rows, num_computed)
        blocks = num_computed[rows] // self._block_size
        is_spare = self._states.capacity[rows] >= (blocks + 2) * self._block_size - 1
        if not is_spare.any():
            return has_released
        taken = self._states.take_behind(rows[is_spare], blocks[is_spare])
        for i in range(np.count_nonzero(is_spare)):
            self._drop_sets(taken.pages[taken.at == i])
        return True

    def release_unseen(
        self, rows: RowIndices, num_computed: Int32Array, table: RequestTable
    ) -> bool:
        """Releases pages that no layer sees, and state sets of blocks in which no pass begins any
        more."""
        has_released = super().release_unseen(rows, num_computed, table)
        blocks = num_computed // self._block_size
        is_due = blocks > self._states.oldest[rows]
        if not is_due.any():
            return has_released
        due = rows[is_due]
        taken = self._states.take_before(due, blocks[is_due])
        self._drop_sets(self._release_kept(table.chains_of(due), taken))
        return True

    def release(self, request: RequestState) -> None:
        """The state at the last border of its tokens stays cached."""
        row = request.row
        num_cached = request.chain.num_cached if self._is_caching else 0
        block = next((each for each in self._states.blocks_of(row) if each <= num_cached), 0)
        if block:
            written = self._states.of_block(row, block)
            self._snapshots.snapshots.cache(request.chain.hashes[block - 1], written)
            self._snapshots.snapshots.renew(request.chain.hashes[block - 1])
            self._states.keep(row, block)
            prompt_end = request.num_prompt_tokens // self._block_size
            if 0 < prompt_end < block:
                # The next turn of the conversation continues from the blocks behind the answer.
                self._snapshots.snapshots.supersede(
                    request.chain.hashes[prompt_end - 1], num_chains=0
                )
        self._drop_sets(self._release_kept([request.chain], self._states.take_all(row)))
        self._stops.pop(row, None)
        super().release(request)

    def _release_kept(self, chains: Sequence[HashChain], taken: TakenSets) -> Int32Array:
        """Releases sets that stay cached and that block sources may store; `chains` are those of
        the rows. Returns the pages of the other sets, [S, pages of a set]."""
        snapshots = self._snapshots.snapshots
        for i in taken.are_kept.nonzero()[0].tolist():
            pages = taken.pages[i].tolist()
            chain = chains[taken.at[i]]
            block = int(taken.blocks[i])
            is_early = snapshots.is_superseded(chain.hashes[block - 1], pages)
            self._loads.release_set(chain, block, pages, is_early=is_early)
        return taken.pages[~taken.are_kept]

    def _drop_sets(self, pages: Int32Array) -> None:
        """Lets go of sets that do not stay cached; pages [S, pages of a set]."""
        for each in pages.tolist():
            self._snapshots.snapshots.uncache(each)
        if pages.size:
            self._pool.release(pages.reshape(-1).tolist())

    @property
    def num_snapshot_pages(self) -> int:
        """Pages of snapshots that no row holds, without those that are evicted before anything
        else."""
        num_held = sum(self._pool.hash_of(page) is not None for page in self._states.first_pages())
        return (self._snapshots.num_snapshots - num_held) * self._states.num_pages

    def num_pages_of(self, request: RequestState) -> int:
        return super().num_pages_of(request) + self._states.num_pages_of(request.row)

    def pages_of(self, row: int) -> list[int]:
        return super().pages_of(row) + self._states.pages_of(row)

    def kv_bytes_of(self, row: int) -> dict[str, int]:
        found = super().kv_bytes_of(row)
        if found:
            found["state"] = self._states.num_pages_of(row) * self._sizes.page
        return found

    def num_returning(self, leaving: Iterable[RequestState]) -> int:
        """Number of pages that become free when these requests leave and copies in flight have
        ended."""
        pages = chain.from_iterable(self.pages_of(request.row) for request in leaving)
        return self._pool.count_returning(chain(pages, self._forks.held_pages))

    def begin_step(self) -> list[Follow]:
        """Lets requests find the snapshots of the step before."""
        self._snapshots.fresh.clear()
        self._leaders.clear()
        advanced = [Follow(each, self.num_full(each)) for each in self._advanced.values()]
        self._advanced.clear()
        return [*super().begin_step(), *advanced]

    def describe(self, load: EngineLoad) -> None:
        super().describe(load)
        num_pages = {
            "state": self._states.num_all * self._states.num_pages,
            "snapshot": self._snapshots.num_found * self._states.num_pages,
        }
        load.num_pages_by_window = self._pages_by_window() | num_pages
        if self._sizes.page:
            load.kv_bytes |= {kind: count * self._sizes.page for kind, count in num_pages.items()}
            # Of a set: the tail that its block has not filled yet is not counted.
            padding = self._states.num_pages * self._sizes.page - self._sizes.of_set
            load.wasted_bytes["state"] = self._states.num_all * padding
            load.wasted_bytes["snapshot"] = self._snapshots.num_found * padding
