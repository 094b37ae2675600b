"""A replica without an engine: prompts wait in one queue, cached blocks are not computed again, and
answers take their time.

Time is that of the running loop's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from headwater.engine_core.config import BY_VALUE, LRU
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn
from headwater.engine_core.step_output import CacheEvents, StoredChain
from headwater.services.runtime.bus import Bus
from headwater.services.runtime.member import Member, ReplicaLoad
from headwater.services.runtime.tasks import owned_task
from tests.simulation.replica_facts import ReplicaFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Speed and size of a replica."""

    num_blocks: int
    prefill_tps: float = 12_000.0
    itl_seconds: float = 0.02
    eviction: str = LRU
    reports_eviction_cost: bool = True
    """Whether the router learns what a placed token evicts."""


@dataclass(slots=True, eq=False)
class Job:
    """A request at a replica; its callbacks report that its prompt is computed and that it is
    over."""

    hashes: Sequence[bytes]
    num_prompt_tokens: int
    num_output_tokens: int
    on_started: Callable[[int], None]
    """Called with the number of tokens that were found cached."""
    on_finished: Callable[[], None]
    turn: Turn = UNKNOWN
    num_uncached_tokens: int = 0
    """Number of tokens to compute, as far as the cache's content showed on arrival."""


class BlockCache:
    """Cache of blocks that evicts the least recently used; every change is reported."""

    def __init__(self, num_blocks: int, tell: Callable[[CacheEvents], None]) -> None:
        self._num_blocks = num_blocks
        self._tell = tell
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    eviction_cost = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Number of blocks of the chain, from the first on, that are cached."""
        return next(
            (length for length, block in enumerate(hashes) if block not in self._blocks),
            len(hashes),
        )

    def use(self, hashes: Sequence[bytes], now: float, turn: Turn) -> None:
        """Stores the chain. Its head is younger than its tail, so that chains shorten from their
        end."""
        num_matched = self.matched(hashes)
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        excess = max(0, len(self._blocks) - self._num_blocks)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
        stored = [block for block in hashes[num_matched:] if block in self._blocks]
        parent = hashes[num_matched - 1] if num_matched else b""
        chains = [StoredChain(parent=parent, hashes=stored)] if stored else []
        if chains or removed:
            self._tell(CacheEvents(stored=chains, removed=removed))


class ValuedCache:
    """An engine's pool of blocks, which evicts by value; every change is reported."""

    def __init__(self, num_blocks: int, tell: Callable[[CacheEvents], None]) -> None:
        self._pool = BlockPool(num_blocks + 1, RecomputeCosts())
        self._tell = tell

    def __len__(self) -> int:
        return len(self._pool.cached_hashes())

    @property
    def eviction_cost(self) -> float:
        return self._pool.eviction_cost

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Number of blocks of the chain, from the first on, that are cached."""
        return len(self._pool.find_leading(hashes))

    def use(self, hashes: Sequence[bytes], now: float, turn: Turn) -> None:
        """Stores the chain."""
        pool = self._pool
        pool.note_time(now)
        hashes = hashes[: pool.num_usable]
        hits = pool.find_leading(hashes)
        pool.share(hits)
        fresh = hashes[len(hits) :]
        added = pool.allocate(len(fresh))
        pool.cache_each(added, fresh)
        pool.release([*hits, *added], turn=turn)
        parent = hashes[len(hits) - 1] if hits else b""
        chains = [StoredChain(parent=parent, hashes=list(fresh))] if fresh else []
        removed = pool.take_evicted()
        if chains or removed:
            self._tell(CacheEvents(stored=chains, removed=removed))


class SimulatedReplica:
    """One replica. Use within `running`."""

    def __init__(self, member: Member, hardware: Hardware, bus: Bus) -> None:
        assert member.model is not None
        self.hardware = hardware
        self._block_size = member.model.block_size
        self.facts = ReplicaFacts(member, bus, self.load)
        cache = ValuedCache if hardware.eviction == BY_VALUE else BlockCache
        self.cache = cache(hardware.num_blocks, self.facts.log.note)
        self._waiting: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._num_waiting_tokens = self.num_running = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        """Number of tokens of all prompts computed here."""

    @property
    def num_waiting(self) -> int:
        """Number of prompts that are not computed yet."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedReplica]:
        async with self.facts.running(), owned_task(self._compute()):
            yield self

    def submit(self, job: Job) -> None:
        job.num_uncached_tokens = job.num_prompt_tokens - self._cached_tokens(job)
        self._waiting.append(job)
        self._num_waiting_tokens += job.num_uncached_tokens
        self._arrived.set()
        self.facts.changed()

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            num_running=self.num_running,
            num_waiting=len(self._waiting),
            num_prefill_tokens=self._num_waiting_tokens,
            num_total_blocks=self.hardware.num_blocks,
            prefill_tps=self.hardware.prefill_tps,
            itl_seconds=self.hardware.itl_seconds,
            max_running=1024,
            eviction_cost=self.cache.eviction_cost * self.hardware.reports_eviction_cost,
        )

    def _cached_tokens(self, job: Job) -> int:
        """Number of cached tokens of a prompt. At least one token is computed, and only whole
        blocks are found."""
        block_size = self._block_size
        cached = self.cache.matched(job.hashes) * block_size
        return min(cached, job.num_prompt_tokens - 1) // block_size * block_size

    async def _compute(self) -> None:
        """Computes prompts one after the other, at the replica's speed."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            job = self._waiting[0]
            cached = self._cached_tokens(job)
            await asyncio.sleep((job.num_prompt_tokens - cached) / self.hardware.prefill_tps)
            self.cache.use(job.hashes, loop.time(), job.turn)
            self._waiting.popleft()
            self._num_waiting_tokens -= job.num_uncached_tokens
            self.num_prompt_tokens += job.num_prompt_tokens
            self.num_cached_tokens += cached
            self.num_running += 1
            self.facts.changed()
            job.on_started(cached)
            loop.call_later(job.num_output_tokens * self.hardware.itl_seconds, self._finish, job)

    def _finish(self, job: Job) -> None:
        self.num_running -= 1
        self.facts.changed()
        job.on_finished()
