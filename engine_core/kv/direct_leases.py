"""Blocks of this engine's KV cache that engines of the same host copy from where they lie.

A lease pins its blocks until the other engine says that it has copied them, or until the link says
that it is gone. Whatever a copy read that outlived its lease, the other engine discards: no second
claim is made for it. Where the blocks are published, engines begin before their lease is here, and
need no second claim. Knows hashes and the block pool; knows nothing about sockets or requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..page_groups import is_block_hash, num_blocks_of
from .block_pool import BlockPool
from .lending import Lender, Release, Steps
from .peer_link import Claim, LeaseRequest, Lent, PeerLink, Places
from .published_blocks import PublishedBlocks

MOST_PINNED = 0.5
"""Share of the KV cache that leases pin at most; others wait for their turn."""


@dataclass(slots=True, eq=False)
class _Lease:
    request: LeaseRequest
    hashes: list[bytes] = field(default_factory=list)
    """Leading requested hashes, whose blocks are pinned."""
    blocks: list[int] = field(default_factory=list)
    before: Claim = field(default_factory=Claim)
    after_step: int = 0
    """The step that the blocks may be read after."""


class DirectLeases:
    """Leases in the order of their requests."""

    def __init__(
        self,
        handle: bytes,
        link: PeerLink,
        pool: BlockPool,
        release: Release,
        steps: Steps,
        lenders: Sequence[Lender],
    ) -> None:
        """`lenders` hold blocks that are not in the KV cache."""
        self._handle = handle
        self._link = link
        self._pool = pool
        self._release = release
        self._steps = steps
        self._published = PublishedBlocks.of(pool, steps)
        self._lenders = tuple(lenders)
        self._most_pinned = max(1, int(MOST_PINNED * len(pool.ref_counts)))
        self._asked: deque[_Lease] = deque()
        self._pinned: dict[int, _Lease] = {}
        """Leases whose blocks are still to be computed by steps in flight."""
        self._open: dict[int, _Lease] = {}
        """Leases whose blocks are being copied, by their number."""
        self._has_released = False
        self.num_lent = 0
        """Blocks that were copied by other engines."""

    @property
    def is_busy(self) -> bool:
        """Whether `advance` is to be called soon."""
        return bool(self._asked or self._pinned or self._has_released)

    @property
    def num_leases(self) -> int:
        return len(self._asked) + len(self._pinned) + len(self._open)

    @property
    def pinned_blocks(self) -> list[int]:
        """Pinned blocks, once for each lease."""
        return [
            block
            for lease in (*self._pinned.values(), *self._open.values())
            for block in lease.blocks
        ]

    @property
    def _published_handle(self) -> bytes:
        return b"" if self._published is None else self._published.handle

    def lend(self, request: LeaseRequest) -> None:
        self._asked.append(_Lease(request))

    def copied(self, number: int) -> None:
        """Ends a lease whose blocks the other engine has copied: their generations are reported
        once more and the blocks released. An unknown lease has ended."""
        if (lease := self._open.pop(number, None)) is None:
            return
        after = claim_of(self._link.key, self._pool, lease.blocks)
        self._let_go(lease)
        self.num_lent += num_blocks_of(lease.hashes)
        self._link.send(Lent(lease=number, rows=[], before=lease.before, after=after))

    def end(self, number: int, num_copied: int = 0) -> None:
        """Ends a lease of which the other engine copied `num_copied` blocks and checked them by
        itself; an unknown lease has ended."""
        for each in (*self._asked, *self._pinned.values(), *self._open.values()):
            if each.request.lease == number:
                self.num_lent += num_blocks_of(each.request.wanted.hashes[:num_copied])
        self._asked = deque(lease for lease in self._asked if lease.request.lease != number)
        for leases in (self._pinned, self._open):
            if (lease := leases.pop(number, None)) is not None:
                self._let_go(lease)

    def publish(self, retired_step: int) -> None:
        """Publishes blocks of steps up to `retired_step`, which have ended. To be called after each
        step."""
        if self._published is not None:
            self._published.advance(retired_step)

    def advance(self, retired_step: int) -> bool:
        """Goes on with every lease; steps up to `retired_step` have ended. Returns whether blocks
        were let go of since the last call."""
        while self._asked and self._pin(self._asked[0]):
            self._asked.popleft()
        for number in [
            number for number, lease in self._pinned.items() if lease.after_step <= retired_step
        ]:
            lease = self._open[number] = self._pinned.pop(number)
            places = Places(
                handle=self._handle, blocks=lease.blocks, published=self._published_handle
            )
            self._link.send(
                Lent(lease=number, rows=[], before=lease.before, after=Claim(), places=places)
            )
        has_released = self._has_released
        self._has_released = False
        return has_released

    def _pin(self, lease: _Lease) -> bool:
        """Pins the leading blocks that are in the KV cache. Returns whether the lease need not wait
        for others."""
        wanted = lease.request.wanted
        hashes = wanted.hashes if wanted.key == self._link.key else []
        found = self._pool.find_leading(hashes)
        if not found or self._is_behind(hashes[len(found) :]):
            # A pull of records can have blocks of every tier.
            self._link.refuse(lease.request.lease)
            return True
        num_free = self._most_pinned - len(self.pinned_blocks)
        if num_free <= 0 or (num_free < len(found) < self._most_pinned and _is_whole(hashes)):
            return False
        lease.blocks = found[:num_free]
        lease.hashes = list(hashes[: min(len(found), num_free)])
        self._pool.share(lease.blocks, is_move=True)
        lease.before = claim_of(self._link.key, self._pool, lease.blocks)
        lease.after_step = self._steps.last_to_compute(lease.hashes)
        self._pinned[lease.request.lease] = lease
        return True

    def _is_behind(self, hashes: Sequence[bytes]) -> bool:
        """Whether a tier behind the KV cache has the next block."""
        for lender in self._lenders if hashes else ():
            if lender.hold(hashes[:1]):
                lender.let_go(hashes[:1])
                return True
        return False

    def _let_go(self, lease: _Lease) -> None:
        wanted = lease.request.wanted
        self._release(lease.blocks, lease.hashes, wanted.owner, wanted.parent)
        self._has_released = True


def _is_whole(keys: Sequence[bytes]) -> bool:
    """Whether some of these pages are useless without the others."""
    return not all(map(is_block_hash, keys))


def claim_of(key: bytes, pool: BlockPool, blocks: Sequence[int]) -> Claim:
    """Claim on blocks as the pool has them now."""
    hashes = [pool.hash_of(block) or b"" for block in blocks]
    return Claim(key=key, hashes=hashes, generations=[pool.generations[block] for block in blocks])
