"""Blocks that other engines copy from this one's cache and from the tiers behind it, each under a
lease.

A lease pins its blocks while they are copied to the link's memory, from where they are sent. It
ends when they are sent or when the engine that asked is gone, and pins nothing afterwards. Engines
of the same host copy from the cache itself: see `DirectLeases`. Knows hashes, the block pool and
slots; knows nothing about sockets or requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..executor import Swapper, SwapPlan
from ..page_groups import block_of, is_block_hash, num_blocks_of
from ..system.lanes import Lane, ThreadLane
from .block_pool import BlockPool
from .block_record import HEADER_LEN, BlockId
from .direct_leases import DirectLeases, claim_of
from .lending import Lender, Read, Release, Steps
from .peer_link import Claim, LeaseRequest, Lent, PeerLink


@dataclass(slots=True, eq=False)
class _Lease:
    request: LeaseRequest
    hashes: list[bytes] = field(default_factory=list)
    """Leading requested hashes, whose blocks are pinned."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the first hashes, in the KV cache; lenders hold the others."""
    reads: list[Read] = field(default_factory=list)
    """Reads of the blocks after those of `blocks`, which other tiers lend."""
    held: list[tuple[Lender, list[bytes]]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    before: Claim = field(default_factory=Claim)
    after_step: int = 0
    """The step that the blocks may be copied after."""
    is_copied: bool = False
    has_ended: bool = False


class _Copies:
    """Leases whose blocks are on their way from the KV cache to slots, in the swapper's order."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._num_saved = 0
        self.leases: deque[_Lease] = deque()

    def begin(self, leases: Sequence[_Lease]) -> None:
        self.leases += leases
        if not any(lease.blocks for lease in leases):
            return
        slots = [slot for lease in leases for slot in lease.slots[: len(lease.blocks)]]
        self._swapper.swap(
            SwapPlan(
                out_blocks=np.array(
                    [block for lease in leases for block in lease.blocks], np.int32
                ),
                out_slots=np.array(slots, np.int32),
            )
        )

    def ended(self) -> Iterator[_Lease]:
        """Leases whose blocks are in their slots now, each once."""
        num_saved = self._swapper.num_saved
        while self.leases and num_saved - self._num_saved >= len(self.leases[0].blocks):
            lease = self.leases.popleft()
            self._num_saved += len(lease.blocks)
            yield lease


class _Written(NamedTuple):
    """A lease whose records are in the link's memory."""

    lease: _Lease
    after: Claim
    """Claim from after the blocks were copied."""
    num_read: int
    """Number of leading blocks that lenders hold and that could be read."""


class _RecordWriter:
    """Writes the records of copied blocks to the link's memory, beside the step loop."""

    def __init__(self, swapper: Swapper, link: PeerLink, lane: Lane) -> None:
        self._swapper = swapper
        self._link = link
        self._lane = lane
        self._num_writing = 0
        self._written: deque[_Written] = deque()

    @property
    def is_busy(self) -> bool:
        return self._num_writing > 0

    def begin(self, lease: _Lease, after: Claim) -> None:
        self._num_writing += 1
        self._lane.submit(partial(self._write, lease, after))

    def ended(self) -> Iterator[_Written]:
        """Leases that are written now, each once."""
        while self._written:
            self._num_writing -= 1
            yield self._written.popleft()

    # The methods below run beside the step loop.

    def _write(self, lease: _Lease, after: Claim) -> None:
        wanted = lease.request.wanted
        num_read = self._read(lease)
        hashes = lease.hashes[: len(lease.blocks) + num_read]
        parents = [wanted.parent, *map(block_of, hashes)]
        for parent, block_hash, slot in zip(parents, hashes, lease.slots, strict=False):
            payload = self._swapper.slots[slot]
            record = self._link.records[slot]
            block = BlockId(self._link.key, wanted.owner.namespace, block_hash, parent)
            header = self._link.seal.header_of(block, memoryview(payload))
            record[:HEADER_LEN] = np.frombuffer(header, np.uint8)
            record[HEADER_LEN:] = payload
        self._written.append(_Written(lease, after, num_read))

    def _read(self, lease: _Lease) -> int:
        """Copies the blocks that other tiers lend. Returns how many leading ones could be read."""
        for num_read, (read, slot) in enumerate(
            zip(lease.reads, lease.slots[len(lease.blocks) :], strict=True)
        ):
            if not read(memoryview(self._swapper.slots[slot])):
                return num_read
        return len(lease.reads)


class BlockLeases:
    """Leases in the order of their requests, as slots become free."""

    def __init__(
        self,
        swapper: Swapper,
        link: PeerLink,
        pool: BlockPool,
        release: Release,
        steps: Steps,
        lenders: Sequence[Lender] = (),
    ) -> None:
        """`swapper` has a slot for each of the link's rows from the first on; `lenders` are asked
        in their order."""
        self._lenders = tuple(lenders)
        self._direct: DirectLeases | None = None
        if (copies := swapper.direct_copies) is not None:
            self._direct = DirectLeases(copies.handle, link, pool, release, steps, lenders)
        self._steps = steps
        self._link = link
        self._pool = pool
        self._release = release
        self._free_slots = deque(range(len(swapper.slots)))
        self._leases: dict[int, _Lease] = {}
        """Leases that have not ended."""
        self._asked: deque[_Lease] = deque()
        self._pinned: list[_Lease] = []
        """Leases whose blocks are still to be computed by steps in flight."""
        self._copies = _Copies(swapper)
        self._writer = _RecordWriter(swapper, link, ThreadLane("kv-lend"))
        self._is_quiet = True
        """Whether nothing was requested since the last `advance`, and no lease waits for a step, a
        copy or a slot."""
        self._num_lent = self.num_lent_from_tiers = 0
        """Blocks that were copied for other engines, and those of them that were not in the KV
        cache."""

    @property
    def is_busy(self) -> bool:
        """Whether `advance` is to be called soon."""
        if self._is_quiet:
            return False
        is_busy = self._goes_on or self._has_slots_for_next
        return is_busy or (self._direct is not None and self._direct.is_busy)

    @property
    def _has_slots_for_next(self) -> bool:
        """Whether the first waiting lease has its slots. Later ones wait behind it: small ones
        would otherwise take the slots of a large one again and again."""
        return bool(self._asked) and len(self._free_slots) >= self._num_slots_needed(self._asked[0])

    @property
    def _goes_on(self) -> bool:
        """Whether a lease with slots waits for a step or a copy, or is written."""
        return bool(self._pinned or self._copies.leases or self._writer.is_busy)

    @property
    def num_leases(self) -> int:
        return len(self._leases) + (self._direct.num_leases if self._direct is not None else 0)

    @property
    def num_lent(self) -> int:
        """Number of blocks that were copied for other engines."""
        return self._num_lent + (self._direct.num_lent if self._direct is not None else 0)

    @property
    def pinned_blocks(self) -> list[int]:
        """Pinned blocks, once for each lease."""
        direct = self._direct.pinned_blocks if self._direct is not None else []
        return [
            *direct,
            *(block for lease in (*self._pinned, *self._copies.leases) for block in lease.blocks),
        ]

    def lend(self, request: LeaseRequest) -> None:
        self._is_quiet = False
        if request.is_direct:
            self._lend_direct(request)
            return
        lease = self._leases[request.lease] = _Lease(request)
        self._asked.append(lease)

    def end(self, number: int, num_copied: int = 0) -> None:
        """Ends a lease; one that is unknown has ended already. Blocks that are being copied are
        discarded. `num_copied`: blocks that another engine copied directly."""
        self._is_quiet = False
        if self._direct is not None:
            self._direct.end(number, num_copied)
        if (lease := self._leases.pop(number, None)) is None:
            return
        lease.has_ended = True
        if lease.is_copied:
            self._free_slots.extend(lease.slots)

    def copied(self, number: int) -> None:
        """Another engine has copied the blocks of a direct lease."""
        self._is_quiet = False
        if self._direct is not None:
            self._direct.copied(number)

    def advance(self, retired_step: int) -> bool:
        """Goes on with every lease; steps up to `retired_step` have ended. Returns whether blocks
        were let go of."""
        if self._direct is not None:
            self._direct.publish(retired_step)
        if self._is_quiet:
            return False
        has_released = self._direct is not None and self._direct.advance(retired_step)
        if self._asked or self._goes_on:
            for written in self._writer.ended():
                self._settle(written)
            self._pin_asked()
            self._copy_pinned(retired_step)
            has_released |= self._release_copied()
        self._is_quiet = not (self._asked or self.is_busy)
        return has_released

    def _lend_direct(self, request: LeaseRequest) -> None:
        if self._direct is not None:
            self._direct.lend(request)
        else:
            self._link.refuse(request.lease)

    def _pin_asked(self) -> None:
        while self._has_slots_for_next:
            lease = self._asked.popleft()
            if lease.has_ended:
                continue
            wanted = lease.request.wanted
            hashes = wanted.hashes[: len(self._free_slots)] if wanted.key == self._link.key else []
            lease.blocks = self._pool.find_leading(hashes)
            lease.hashes = hashes[: len(lease.blocks)]
            self._hold_behind(lease, hashes)
            if not lease.hashes:
                self._answer(lease, Claim())
                continue
            self._pool.share(lease.blocks, is_move=True)
            lease.before = self._claim(lease)
            lease.slots = [self._free_slots.popleft() for _ in lease.hashes]
            lease.after_step = self._steps.last_to_compute(lease.hashes)
            self._pinned.append(lease)

    def _num_slots_needed(self, lease: _Lease) -> int:
        """Least number of free slots for which a lease need not wait: one, or all of its pages if
        some of them are useless without the others."""
        hashes = lease.request.wanted.hashes
        if lease.has_ended or all(map(is_block_hash, hashes)):
            return 1
        return min(len(hashes), len(self._link.records) // 2)

    def _hold_behind(self, lease: _Lease, hashes: Sequence[bytes]) -> None:
        """Adds the blocks after those of the KV cache that lenders have."""
        while len(lease.hashes) < len(hashes):
            rest = hashes[len(lease.hashes) :]
            found = ((lender, lender.hold(rest)) for lender in self._lenders)
            lender, reads = next(((lender, reads) for lender, reads in found if reads), (None, []))
            if lender is None:
                return
            lease.held.append((lender, list(rest[: len(reads)])))
            lease.hashes += rest[: len(reads)]
            lease.reads += reads

    def _copy_pinned(self, retired_step: int) -> None:
        due = [lease for lease in self._pinned if lease.after_step <= retired_step]
        if due:
            self._pinned = [lease for lease in self._pinned if lease.after_step > retired_step]
            self._copies.begin(due)

    def _release_copied(self) -> bool:
        has_released = False
        for lease in self._copies.ended():
            after = self._claim(lease)
            wanted = lease.request.wanted
            self._release(lease.blocks, lease.hashes, wanted.owner, wanted.parent)
            self._writer.begin(lease, after)
            has_released = True
        return has_released

    def _claim(self, lease: _Lease) -> Claim:
        """The lease's blocks as they are now. Blocks that are not in the KV cache have generation
        0: they do not change."""
        claim = claim_of(self._link.key, self._pool, lease.blocks)
        behind = lease.hashes[len(lease.blocks) :]
        return replace(
            claim, hashes=claim.hashes + behind, generations=claim.generations + [0] * len(behind)
        )

    def _settle(self, written: _Written) -> None:
        lease, after, num_read = written
        lease.is_copied = True
        for lender, hashes in lease.held:
            lender.let_go(hashes)
        num_lent = len(lease.blocks) + num_read
        self._num_lent += num_blocks_of(lease.hashes[:num_lent])
        self.num_lent_from_tiers += num_blocks_of(lease.hashes[len(lease.blocks) : num_lent])
        after = replace(
            after, hashes=after.hashes[:num_lent], generations=after.generations[:num_lent]
        )
        if lease.has_ended:
            self._free_slots.extend(lease.slots)
        else:
            self._answer(lease, after)

    def _answer(self, lease: _Lease, after: Claim) -> None:
        lease.is_copied = True
        self._link.send(
            Lent(lease=lease.request.lease, rows=lease.slots, before=lease.before, after=after)
        )
