"""Eviction order of blocks without references: least value first, and within a chain the last block
first. Knows blocks and turns; knows no requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from .block_notes import BlockNotes
from .recompute import RecomputeCosts
from .return_times import ReturnClasses, Sample
from .rings import Rings
from .stays import Stay
from .turn import UNKNOWN, Turn
from .victims import Victims

MOST_REMEMBERED = 1 << 14
"""Most sessions whose last stay is remembered, and most evicted stays whose return is still
awaited."""
SHARED_KINDS = ("", "shared by 2", "shared by 4", "shared by 8")
LEFT = "left"
"""Kind of the blocks after the one from which another chain branched off."""


class ValueOrder:
    """Free blocks that a pool caches."""

    def __init__(
        self,
        hash_of: Sequence[bytes | None],
        costs: RecomputeCosts,
        times: ReturnClasses,
        retire: Callable[[Sequence[int]], None],
    ) -> None:
        """`hash_of` is the pool's; `retire` puts blocks where those without value are, in order of
        eviction."""
        self.now = 0.0
        """Time of what happens next, in seconds."""
        self._missed: dict[bytes, Sample] = {}
        """Stays that were evicted and have not returned, by the hash of their last block."""
        self._evicted = deque[bytes]()
        """Hashes of the last blocks of stays that were evicted of late, in order."""
        self._hash_of = hash_of
        self._retire = retire
        self._rings = Rings(len(hash_of), costs, times)
        self._notes = BlockNotes()
        self._victims = Victims(self._rings, costs, self._note_lost)
        self._last_of: OrderedDict[tuple[str, str], Stay] = OrderedDict()
        """The last stay of each session, by tenant and session."""

    @property
    def num_blocks(self) -> int:
        return self._rings.num_blocks

    @property
    def tenants(self) -> set[str]:
        """Tenants that have free blocks, or had a turn of late."""
        return set(self._rings.shares)

    def num_of(self, tenant: str) -> int:
        """Free blocks of a tenant."""
        share = self._rings.shares.get(tenant)
        return share.num_blocks if share is not None else 0

    def has_share(self, tenant: str) -> bool:
        """Whether a tenant has as many free blocks as are its share."""
        share = self._rings.shares.get(tenant)
        return share is not None and share.num_spare(self.num_blocks) >= 0

    @property
    def num_kept(self) -> int:
        """Blocks that a hint keeps now."""
        return self._notes.num_kept(self.now)

    @property
    def eviction_cost(self) -> float:
        """Expected number of blocks to compute again for each block that is evicted now, in units
        of the first block of a chain."""
        return self._victims.cost(self.now) if self.num_blocks else 0.0

    def admit(
        self,
        blocks: list[int],
        last: int,
        turn: Turn = UNKNOWN,
        *,
        is_move: bool = False,
    ) -> None:
        """Adds blocks of a chain that have no reference any more, in order; the last one has index
        `last` in its chain. Blocks with different numbers of users begin stays of their own.
        `is_move`: a transfer held them."""
        num_rounds = self._notes.take_rounds(blocks)
        newest = None
        # From the last run to the first, as blocks are evicted.
        for start, end, level in reversed(self._notes.runs(blocks)):
            depth = last - len(blocks) + end
            run = blocks[start:end]
            kind = SHARED_KINDS[level] if level else turn.kind
            until = self.now + turn.keep_seconds if turn.keep_seconds else 0.0
            kept_until = self._notes.keep(run, until)
            stay = self._begin(run, depth, turn, kind, num_rounds, kept_until, is_moved=is_move)
            newest = newest if level else stay
        if turn.session and newest is not None:
            self._supersede(turn, newest)

    def _begin(
        self,
        blocks: list[int],
        depth: int,
        turn: Turn,
        kind: str,
        num_rounds: int,
        kept_until: float,
        *,
        is_moved: bool = False,
    ) -> Stay:
        now = self.now
        ring = self._rings.ring(turn, kind, depth, num_rounds, now, kept_until)
        stay = Stay(now, ring, turn, blocks, depth, num_rounds, kept_until, is_moved=is_moved)
        if not is_moved:
            stay.is_observed = ring.times.begin(stay)
        self._rings.append(stay)
        return stay

    def _supersede(self, turn: Turn, newest: Stay) -> None:
        """Takes over the value of a session's last turn: what is left of that has none."""
        key = turn.tenant, turn.session
        last = self._last_of.pop(key, None)
        self._last_of[key] = newest
        if len(self._last_of) > MOST_REMEMBERED:
            self._last_of.popitem(last=False)
        if last is not None and last.is_diverged and last.blocks:
            blocks = self._rings.withdraw(last)
            self._notes.forget(blocks)
            last.end(self.now, has_returned=False)
            self._retire(blocks[::-1])

    def note_hit(
        self, blocks: Sequence[int], ref_counts: Sequence[int], *, is_move: bool = False
    ) -> list[int]:
        """Notes that one more sequence uses these blocks, given from first to last; to be called
        before the references are counted. Returns the free blocks among them that were not in this
        order. `is_move`: a transfer uses them, so no stay returns."""
        if not blocks:
            return []
        stay_of = self._rings.stay_of
        held: list[int] = []
        unordered: list[int] = []
        left: dict[Stay, list[int]] = {}
        for block in blocks:
            if ref_counts[block]:
                held.append(block)
            elif (stay := stay_of[block]) is None:
                unordered.append(block)
            elif stay in left:
                left[stay].append(block)
            else:
                left[stay] = [block]
        if held and not is_move:
            self._notes.note_other(held)
        for stay, its_blocks in left.items():
            self._leave(stay, its_blocks, is_move=is_move)
        return unordered

    def _leave(self, stay: Stay, blocks: list[int], *, is_move: bool) -> None:
        """Notes that blocks of a stay, from first to last, are in use again."""
        tail = stay.blocks[-1]
        if self._rings.leave(stay, blocks):
            stay.end(self.now, has_returned=not is_move)
            is_round = not (is_move or stay.is_moved)
            self._notes.note_return(tail, stay.num_rounds + is_round)
            return
        if is_move:
            return
        self._notes.note_other(blocks)
        stay.is_diverged = True
        if not stay.turn.session:
            self._reclass(stay)

    def _reclass(self, stay: Stay) -> None:
        """Moves the rest of a stay from which another chain branched off to the class of such
        blocks."""
        stay.end(self.now, has_returned=False)
        blocks = self._rings.withdraw(stay)
        self._begin(blocks, stay.depth, stay.turn, LEFT, 0, stay.kept_until)

    def take(self, count: int) -> list[int]:
        """Takes so many blocks of the least values."""
        blocks = self._victims.take(self.now, count)
        self._notes.forget(blocks)
        return blocks

    def _note_lost(self, stay: Stay) -> None:
        """Remembers a stay whose last block is evicted, until it would have returned."""
        stay.is_observed = False
        if (block_hash := self._hash_of[stay.blocks[-1]]) is None:
            return
        self._missed[block_hash] = stay
        self._evicted.append(block_hash)
        if len(self._evicted) > MOST_REMEMBERED:
            self._missed.pop(self._evicted.popleft(), None)

    def forget(self, blocks: Sequence[int]) -> None:
        """Forgets blocks whose contents are lost though they were not evicted by this order."""
        self._notes.forget(blocks)

    def note_computed(self, hashes: Sequence[bytes]) -> None:
        """Notes that blocks are computed again: evicted stays would have returned now."""
        missed = self._missed
        if not missed.keys().isdisjoint(hashes):
            for block_hash in hashes:
                if block_hash in missed:
                    missed.pop(block_hash).end(self.now, has_returned=True)
