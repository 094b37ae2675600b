"""Waiting requests whose next blocks are on their way: another request computes them, or a block
source loads them.

Decides what a request waits for and when it goes on; knows nothing about rows, seats and steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..kv.block_loads import BlockLoads, Offer
from ..kv.block_source import Loader, Ticket
from ..kv.prefix_cache import PrefixCache
from .prefix_hits import PrefixHits
from .request_state import RequestState
from .waiting_queue import WaitingQueue


class BlockWaits:
    def __init__(
        self,
        loads: BlockLoads,
        cache: PrefixCache,
        waiting: WaitingQueue,
        prefilling: Mapping[int, RequestState],
        hits: PrefixHits,
        block_size: int,
    ) -> None:
        """`prefilling`: the requests that compute known tokens, now and later."""
        self._loads = loads
        self._cache = cache
        self._waiting = waiting
        self._prefilling = prefilling
        self._hits = hits
        self._block_size = block_size

    def follow(self, request: RequestState, num_hits: int, max_hits: int) -> bool:
        """Holds a request whose first missing block is computed or fetched for another, until it is
        there."""
        missed = request.chain.hashes[num_hits]
        for leader in self._prefilling.values():
            hashes = leader.chain.hashes
            if leader.chain.num_cached <= num_hits < len(hashes) and hashes[num_hits] == missed:
                self._waiting.follow(
                    leader, request, min(max_hits, request.chain.num_shared(leader.chain))
                )
                return True
        if (ticket := self._loads.ticket(missed, request.failed_sources)) is not None:
            self._await(request, ticket)
        return ticket is not None

    def load(self, request: RequestState, offer: Offer, hits: list[int]) -> None:
        """Holds a request until a source has loaded what it offers, which follows on the cached
        blocks `hits`."""
        self._await(request, self._loads.load(offer, request.chain, hits))

    def settle(self) -> bool:
        """Lets requests go on whose loads have ended. Returns whether any load has."""
        settled = self._loads.poll()
        for load in settled:
            for request in self._waiting.load_ended(load.ticket):
                self._hits.note_loaded(request, load.tier, load.num_loaded * self._block_size)
                if load.failed_source is not None:
                    self._compute_instead(request, load.failed_source)
        return bool(settled)

    def _await(self, request: RequestState, ticket: Ticket) -> None:
        self._hits.note_waits(request)
        self._waiting.await_load(request, ticket)

    def _compute_instead(self, request: RequestState, source: Loader) -> None:
        """The request goes on as if the source had nothing, until it has a row."""
        request.failed_sources += (source,)
        max_hits = request.num_cacheable_blocks(self._block_size)
        num_hits = len(self._cache.match(request.chain, max_hits))
        self._waiting.recount(request, request.num_tokens - num_hits * self._block_size)
