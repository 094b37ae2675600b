"""Free blocks in rings, a ring a class of turns, linked by the pool's lists. Knows no values."""

from __future__ import annotations

from collections.abc import Sequence

from .recompute import RecomputeCosts
from .return_times import ReturnClasses
from .stays import Ring, Share, Stay
from .turn import Turn

MOST_PRIORITY = 8
MOST_ROUNDS = 3
"""Largest number of rounds of a chain with a class of its own; chains with more share its class."""


class Rings:
    def __init__(
        self,
        following: list[int],
        preceding: list[int],
        costs: RecomputeCosts,
        times: ReturnClasses,
    ) -> None:
        """`following` and `preceding`: the pool's links of blocks, behind which those of the
        borders of rings are put."""
        self.shares: dict[str, Share] = {}
        """Shares of the blocks that nobody holds, by tenant."""
        self.num_blocks = 0
        self._next = following
        self._prev = preceding
        self._costs = costs
        self._times = times
        self._free_borders = list[int]()
        """Borders of rings that were dropped."""
        self.stay_of: list[Stay | None] = [None] * len(following)
        """Stay that a block belongs to, by block; None: it is in no ring, or leaves its ring at
        this moment."""

    def ring(
        self, turn: Turn, kind: str, depth: int, num_rounds: int, now: float, kept_until: float
    ) -> Ring:
        """The ring of stays of such turns. Only the ends of a ring are compared with others, so
        that those which a hint keeps for longer have another one: they hide none whose time is
        over."""
        share = self.shares.get(turn.tenant)
        if share is None:
            share = self.shares[turn.tenant] = Share(now)
        if turn.weight:
            share.weight = turn.weight
            share.last_used = now
        length = self._costs.length_class(depth)
        rounds = min(num_rounds, MOST_ROUNDS)
        priority = max(-MOST_PRIORITY, min(turn.priority, MOST_PRIORITY))
        kept = int(max(0.0, kept_until - now)).bit_length()
        key = (kind, length, rounds, priority, kept)
        if (ring := share.rings.get(key)) is None:
            border = self._new_border()
            times = self._times.of((turn.tenant, kind, rounds, length))
            ring = share.rings[key] = Ring(border, times, share, 2.0**priority)
        return ring

    def _new_border(self) -> int:
        if self._free_borders:
            return self._free_borders.pop()
        border = len(self._next)
        self._next.append(border)
        self._prev.append(border)
        return border

    def drop_left(self, since: float) -> None:
        """Forgets tenants that have no blocks and had no turn since then, with their classes."""
        left = {
            tenant
            for tenant, share in self.shares.items()
            if not share.num_blocks and share.last_used < since
        }
        for tenant in left:
            # A ring without blocks begins and ends at its border.
            self._free_borders += (ring.border for ring in self.shares.pop(tenant).rings.values())
        if left:
            self._times.drop(left)

    def append(self, stay: Stay, blocks: Sequence[int]) -> None:
        """Puts the blocks of a stay behind all others of its ring."""
        stay.tail = blocks[0]
        stay.num_blocks = len(blocks)
        following = self._next
        preceding = self._prev
        stay_of = self.stay_of
        border = stay.ring.border
        before = preceding[border]
        for block in blocks:
            following[before] = block
            preceding[block] = before
            stay_of[block] = stay
            before = block
        following[before] = border
        preceding[border] = before
        self.count(stay.ring, len(blocks))

    def withdraw(self, stay: Stay) -> list[int]:
        """Takes the blocks of a stay out of their ring, the last one of the chain first."""
        blocks = list[int]()
        block = stay.tail
        while len(blocks) < stay.num_blocks:
            # Blocks that are hit at this moment are linked still.
            if self.stay_of[block] is stay:
                blocks.append(block)
            block = self._next[block]
        for block in blocks:
            before = self._prev[block]
            after = self._next[block]
            self._next[before] = after
            self._prev[after] = before
            self.stay_of[block] = None
        self.count(stay.ring, -len(blocks))
        stay.num_blocks = 0
        return blocks

    def take_last(self, stay: Stay, most: int) -> list[int]:
        """Takes up to `most` of the last blocks of a stay out of its ring."""
        stay_of = self.stay_of
        following = self._next
        blocks = list[int]()
        block = stay.tail
        for _ in range(min(most, stay.num_blocks)):
            blocks.append(block)
            stay_of[block] = None
            block = following[block]
        before = self._prev[stay.tail]
        following[before] = block
        self._prev[block] = before
        stay.num_blocks -= len(blocks)
        stay.depth -= len(blocks)
        stay.tail = block
        self.count(stay.ring, -len(blocks))
        return blocks

    def note_left(self, stay: Stay, num_blocks: int) -> bool:
        """Notes that so many blocks of a stay are in use again, whose places in `stay_of` are
        cleared; whether the last one of the stay is among them."""
        self.count(stay.ring, -num_blocks)
        stay.num_blocks -= num_blocks
        if self.stay_of[stay.tail] is stay:
            return False
        while stay.num_blocks and self.stay_of[stay.tail] is not stay:
            stay.tail = self._next[stay.tail]
        return True

    def end_of(self, ring: Ring, *, is_newest: bool) -> Stay | None:
        """The newest or the oldest stay of a ring; None where it is empty."""
        block = self._prev[ring.border] if is_newest else self._next[ring.border]
        return self.stay_of[block] if block < len(self.stay_of) else None

    def count(self, ring: Ring, num_blocks: int) -> None:
        """Counts blocks that come to a ring, or leave it where the number is negative."""
        ring.num_blocks += num_blocks
        ring.share.num_blocks += num_blocks
        self.num_blocks += num_blocks
