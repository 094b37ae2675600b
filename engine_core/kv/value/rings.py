"""Free blocks in rings, a ring a class of turns. Knows no values."""

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
    def __init__(self, num_blocks: int, costs: RecomputeCosts, times: ReturnClasses) -> None:
        self.shares: dict[str, Share] = {}
        """Shares of the blocks that no request holds, by tenant."""
        self.num_blocks = 0
        self._costs = costs
        self._times = times
        self.stay_of: list[Stay | None] = [None] * num_blocks
        """Stay of each block; None: it is in no ring, or is being removed."""

    def ring(
        self, turn: Turn, kind: str, depth: int, num_rounds: int, now: float, kept_until: float
    ) -> Ring:
        """The ring of stays of such turns. Stays that a hint keeps for longer are in a ring of
        their own: only the ends of rings are compared, and a kept stay must not hide others."""
        share = self.shares.get(turn.tenant)
        if share is None:
            share = self.shares[turn.tenant] = Share(now)
        if turn.weight:
            share.weight = turn.weight
            share.last_used = now
        length = self._costs.length_class(depth)
        rounds = num_rounds if num_rounds < MOST_ROUNDS else MOST_ROUNDS
        kept = int(kept_until - now).bit_length() if kept_until > now else 0
        priority = turn.priority
        if priority:
            priority = max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
        key = (kind, length, rounds, priority, kept)
        if (ring := share.rings.get(key)) is None:
            times = self._times.of((turn.tenant, kind, rounds, length))
            ring = share.rings[key] = Ring(times, share, 2.0**priority)
        return ring

    def drop_left(self, since: float) -> None:
        """Forgets tenants that have no blocks and had no turn since then, with their classes."""
        left = {
            tenant
            for tenant, share in self.shares.items()
            if not share.num_blocks and share.last_used < since
        }
        for tenant in left:
            del self.shares[tenant]
        if left:
            self._times.drop(left)

    def append(self, stay: Stay) -> None:
        """Appends a stay to its ring."""
        stay_of = self.stay_of
        blocks = stay.blocks
        for block in blocks:
            stay_of[block] = stay
        stay.ring.stays[stay] = None
        num_blocks = len(blocks)
        stay.ring.share.num_blocks += num_blocks
        self.num_blocks += num_blocks

    def withdraw(self, stay: Stay) -> list[int]:
        """Takes the blocks of a stay out of their ring, the first one of the chain first."""
        blocks = stay.blocks
        stay.blocks = []
        self._note_taken(stay, blocks)
        return blocks

    def take_last(self, stay: Stay, most: int) -> list[int]:
        """Removes up to `most` of the last blocks of a stay from its ring, last one first."""
        taken = stay.blocks[: -most - 1 : -1]
        del stay.blocks[-most:]
        stay.depth -= len(taken)
        self._note_taken(stay, taken)
        return taken

    def leave(self, stay: Stay, blocks: list[int]) -> bool:
        """Removes blocks of a stay that are in use again, from first to last, from its ring.
        Returns whether the last block of the stay is among them."""
        is_whole = stay.take_out(blocks)
        self._note_taken(stay, blocks)
        return is_whole

    def _note_taken(self, stay: Stay, blocks: Sequence[int]) -> None:
        stay_of = self.stay_of
        for block in blocks:
            stay_of[block] = None
        if not stay.blocks:
            stay.ring.stays.pop(stay, None)
        num_blocks = len(blocks)
        stay.ring.share.num_blocks -= num_blocks
        self.num_blocks -= num_blocks
