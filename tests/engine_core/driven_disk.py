"""Blocks on a disk beside a device, which tests drive step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.executors.simulated.swapper import SimulatedSwapper
from headwater.engine_core.kv.block_loads import BlockLoads
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.block_source import Owner, Ticket
from headwater.engine_core.kv.disk.block_files import PAGE_BYTES, BlockFiles
from headwater.engine_core.kv.disk.disk_blocks import DiskBlocks
from headwater.engine_core.kv.prefix_cache import NO_HITS, HashChain, HeldPages, PrefixCache
from headwater.engine_core.kv.value.recompute import RecomputeCosts
from headwater.engine_core.kv.value.tier_values import TierValues
from headwater.engine_core.kv.value.turn import UNKNOWN, Turn
from tests.engine_core.manual_lane import ManualLane

BLOCK_SIZE = 16
NUM_BLOCKS = 33
NUM_SLOTS = 8
KEY = b"k" * 16


class FailingFiles(BlockFiles):
    """Raises this error where there is one."""

    error: OSError | None = None

    def write(self, owner: Owner, block_hash: bytes, parent: bytes, payload: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        return super().write(owner, block_hash, parent, payload)

    def read(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        return super().read(namespace, block_hash, into)


class Blocks:
    """A pool with a disk beside it. A block contains the first eight bytes of its hash."""

    def __init__(
        self,
        root: Path,
        *,
        max_files: int = 100,
        num_slots: int = NUM_SLOTS,
        compute_seconds: float = 0.0,
        by_value: bool = False,
    ) -> None:
        self.now = 0.0
        self.kv: UInt64Array = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.uint64)
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.swapper = SimulatedSwapper(self.kv, num_slots, late_polls=0)
        self.writes = ManualLane()
        self.reads = ManualLane()
        files = FailingFiles.open(root, KEY, max_files * PAGE_BYTES, BlockSeal())
        assert isinstance(files, FailingFiles)
        self.files = files
        self.disk = DiskBlocks(
            self.swapper,
            self.files,
            TierValues(max_files, RecomputeCosts(), lambda: self.now) if by_value else None,
            block_size=BLOCK_SIZE,
            clock=lambda: self.now,
            writes=self.writes,
            reads=self.reads,
        )
        self.loads = BlockLoads(
            self.pool, self.cache, [self.disk], lambda: self.now, lambda: compute_seconds
        )
        self.reported = set[bytes]()

    def compute(self, chain: HashChain) -> None:
        """A sequence that comes, computes all blocks and leaves."""
        blocks = self.pool.allocate(len(chain.hashes))
        chain.num_cached = 0
        self.cache.announce(self.cache.offer(chain, blocks))
        for block, block_hash in zip(blocks, chain.hashes, strict=True):
            self.kv[block] = content(block_hash)
        self.loads.release_part(chain, 0, HeldPages(0, len(blocks), blocks))
        self.step()

    def use(self, chain: HashChain) -> None:
        """A sequence that comes, finds all blocks on the device and leaves."""
        hits = self.cache.match(chain, len(chain.hashes)).pages
        self.pool.share(hits)
        self.loads.release_part(chain, 0, HeldPages(0, len(hits), hits))
        self.step()

    def flood(self) -> None:
        """Other blocks take the whole device."""
        self.pool.release(self.pool.allocate(self.pool.num_free))
        self.kv[:] = 0

    def step(self) -> None:
        self.loads.launch()
        self.loads.poll()
        self.loads.launch()
        self.receive()

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(60):
            self.writes.run()
            self.reads.run()
            self.step()

    def receive(self) -> None:
        if (events := self.cache.take_events()) is not None:
            assert self.reported >= set(events.removed)
            self.reported -= set(events.removed)
            stored = [block_hash for chain in events.stored for block_hash in chain.hashes]
            assert self.reported.isdisjoint(stored)
            assert len(set(stored)) == len(stored)
            self.reported |= set(stored)
        assert self.reported == set(self.pool.cached_hashes())

    def load(self, chain: HashChain) -> Ticket:
        offer = self.loads.find(chain, 0, len(chain.hashes))
        assert offer is not None
        return self.loads.load(offer, chain, NO_HITS)

    def found(self, chain: HashChain) -> int:
        """Leading blocks of a chain that the device has, with the right contents."""
        blocks = self.cache.match(chain, len(chain.hashes)).pages
        for block, block_hash in zip(blocks, chain.hashes, strict=False):
            assert (self.kv[block] == content(block_hash)).all()
        return len(blocks)

    def check_idle(self) -> None:
        assert self.pool.num_used == 0
        assert (
            len(self.disk._free_slots) == len(set(self.disk._free_slots)) == len(self.swapper.slots)
        )
        assert not self.disk.has_background_work
        assert not self.disk._held.order._num_holds


def content(block_hash: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(block_hash[:8], "little"))


def chain_of(first_token: int, num_blocks: int, turn: Turn = UNKNOWN) -> HashChain:
    chain = HashChain(b"n" * 16, "alice", turn=turn)
    chain.cover(
        np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE
    )
    return chain
