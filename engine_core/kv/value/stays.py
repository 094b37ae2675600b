"""Stays: blocks that a sequence released together and that wait in the cache for the next turn, in
rings by class. Knows no values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from .return_times import ReturnTimes, Sample
from .turn import Turn


class Stay(Sample):
    """Blocks of one chain that have had no reference since the same moment."""

    __slots__ = (
        *("blocks", "depth", "is_diverged", "is_moved", "is_observed"),
        *("kept_until", "num_rounds", "ring", "turn"),
    )

    def __init__(
        self,
        began: float,
        ring: Ring,
        turn: Turn,
        blocks: list[int],
        depth: int,
        num_rounds: int = 0,
        kept_until: float = 0.0,
        *,
        is_moved: bool = False,
    ) -> None:
        """`blocks`: from first to last in the chain; the last is evicted first. `depth`: index of
        the last block in its chain. `num_rounds`: how often the chain has returned so far.
        `kept_until`: time up to which a hint keeps it. `is_moved`: a transfer held its blocks, so
        its duration is not learnt from."""
        super().__init__(began)
        self.ring = ring
        self.turn = turn
        self.blocks = blocks
        self.depth = depth
        self.num_rounds = num_rounds
        self.kept_until = kept_until
        self.is_moved = is_moved
        self.is_observed = False
        """Whether a return is learnt from, and no block of it was evicted yet."""
        self.is_diverged = False
        """Whether a chain went on from the middle of it."""

    def take_out(self, blocks: list[int]) -> bool:
        """Removes blocks that are in use again, from first to last. Returns whether the last block
        of the stay is among them."""
        own = self.blocks
        last = own[-1]
        num_blocks = len(blocks)
        if own[:num_blocks] == blocks:
            del own[:num_blocks]
        else:
            used = set(blocks)
            own[:] = [block for block in own if block not in used]
        return not own or own[-1] != last


class Ring:
    """Stays of one class with chains of similar length, oldest first."""

    __slots__ = ("factor", "share", "stays", "times")

    def __init__(self, times: ReturnTimes, share: Share, factor: float = 1.0) -> None:
        self.times = times
        self.share = share
        self.factor = factor
        """Factor by which hints multiply the value of the ring's blocks."""
        self.stays = OrderedDict[Stay, None]()
        """Stays of the ring, the oldest first: a dict would be searched past every entry that left
        its front."""

    def end(self, *, is_newest: bool) -> Stay | None:
        """The newest or the oldest stay; None where there is none."""
        stays = self.stays
        return next(reversed(stays) if is_newest else iter(stays), None)


class Share:
    """A tenant's part of the blocks that no request holds."""

    def __init__(self, now: float) -> None:
        self.weight = 1.0
        self.fraction = 0.0
        """Fraction of all free blocks that the tenant keeps while others have blocks to evict."""
        self.num_blocks = 0
        self.last_used = now
        self.rings: dict[tuple[str, int, int, int, int], Ring] = {}
        """Rings by kind of turn, class of length, rounds, priority, and bits of the seconds for
        which a hint keeps their blocks."""

    def num_spare(self, num_blocks: int) -> int:
        """Number of blocks, of the `num_blocks` of all tenants, that this tenant may lose until it
        has less than its fraction of those that are left; negative: it has less already."""
        if self.num_blocks == num_blocks:
            return num_blocks
        # Rounded down, so that a tenant with exactly its share counts as having it and some tenant
        # always has blocks to lose.
        above = self.num_blocks - int(num_blocks * self.fraction)
        return above if above <= 0 else int(above / (1 - self.fraction))


def set_fractions(shares: Collection[Share], now: float, active: float) -> None:
    """Divides the free blocks by the tenants' weights. A share counts for `active` seconds after
    its tenant's last turn."""
    weights = [share.weight if now - share.last_used <= active else 0.0 for share in shares]
    total = sum(weights) or 1.0
    for share, weight in zip(shares, weights, strict=True):
        share.fraction = weight / total
