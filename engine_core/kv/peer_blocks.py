"""The block source that pulls blocks from other engines.

A request says which engine is thought to hold the beginning of its prompt. That is advice: a pull
brings records that the cluster's secret sealed, and claims of the other engine from before and
after it copied them. A block is used only where all of that fits; the others are computed. Where
both engines are of one host, blocks are copied out of the other one's KV cache instead: see
`DirectPulls`. Knows hashes and slots; knows nothing about sockets or requests.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from ..executor import Swapper
from ..request import Holder
from ..system.lanes import Lane, ThreadLane
from .block_record import HEADER_LEN
from .block_source import NOT_OURS, LoadEnd, OnGained, OnLost, Outcome, Owner, Ticket
from .direct_pulls import DirectEnd, DirectPulls
from .peer_link import PeerLink, Placed, Pulled, PullEnd, PullRequest, Wanted
from .prefix_hash import num_common
from .read_costs import ReadCosts
from .staged_loads import Part, StagedLoads

MOST_HINTS = 1 << 16
"""Blocks whose holders are remembered; the oldest go first."""
HINT_SECONDS = 60.0
"""Seconds after which a hint counts no more: its blocks have come or were computed, and its holder
may be gone."""
ASSUMED_BYTES_PER_SECOND = 200e6
"""Speed of a pull before the first one was measured. Two processes on two busy cores reached 250 to
300 MB/s, without the copies at either end (2026-11-23)."""


class _Hint(NamedTuple):
    """Where the blocks of a chain are thought to be. One object for all of them: a prompt has
    hundreds."""

    holder: Holder
    owner: Owner
    hashes: Sequence[bytes]
    """Hashes of the chain, from its first block on."""
    until: float
    """When it counts no more."""


class _Origin(NamedTuple):
    """Where the blocks of a load come from, and what the first one follows."""

    holder: Holder
    owner: Owner
    parent: bytes


class PeerBlocks:
    """See `BlockSource`."""

    tier = "peer"
    keeps_blocks = False
    spares_steps = True
    held = NOT_OURS

    def __init__(
        self,
        swapper: Swapper,
        link: PeerLink,
        first_row: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        lane: Lane | None = None,
    ) -> None:
        """`swapper` has a slot for each of the link's rows from `first_row` on."""
        self._swapper = swapper
        self._link = link
        self._first_row = first_row
        self._clock = clock
        self._lane = lane or ThreadLane("kv-pull")
        self._hints: OrderedDict[bytes, _Hint] = OrderedDict()
        self._free_slots = deque(range(len(swapper.slots)))
        self._loads = StagedLoads(swapper, self._free_slots, self._pull)
        self._origins: dict[Ticket, _Origin] = {}
        """Origin of each load that has not ended."""
        self._early: set[Ticket] = set()
        """Loads whose blocks the holder may still compute."""
        self._pulls: dict[int, Part] = {}
        """Pulls by number that the link has not answered."""
        self._num_taking = 0
        """Parts that are being copied from their rows."""
        self._numbers = count(1)
        self._results: deque[Callable[[], None]] = deque()
        """Results of jobs, which the step loop applies."""
        self._costs = ReadCosts(clock)
        self._direct_costs = ReadCosts(clock)
        self._costs.assume(swapper.slots.shape[1] / ASSUMED_BYTES_PER_SECOND)
        self._costs_of: dict[Ticket, ReadCosts] = {}
        """Costs of its way, for each load that has not ended."""
        self._direct: DirectPulls | None = None
        if (copies := swapper.direct_copies) is not None:
            self._direct = DirectPulls(copies, link)
            self._direct_costs.assume(copies.seconds_per_block)
        self._is_direct = False
        """Whether the way to the engine that `find` spoke of last is direct."""
        self.num_pulled = self.num_direct = self.num_discarded = 0
        """Blocks that came and were used, those of them that came directly, and those that were
        asked for and did not come whole."""

    @property
    def has_background_work(self) -> bool:
        """Slots of loads that were given up come back."""
        return self._num_taking > 0

    @property
    def seconds_per_block(self) -> float:
        """Lately, from the pull to the device, by the way to the engine that was looked at last."""
        if self._is_direct:
            return self._direct_costs.seconds_per_block
        return self._costs.seconds_per_block + self._swapper.seconds_per_block

    def expect(self, hashes: Sequence[bytes], owner: Owner, holder: Holder) -> None:
        """Notes that another engine is thought to hold these blocks, the first of a chain."""
        hint = _Hint(holder, owner, hashes, self._clock() + HINT_SECONDS)
        hints = self._hints
        for block_hash in hashes:
            hints[block_hash] = hint
            hints.move_to_end(block_hash)
        while len(self._hints) > MOST_HINTS:
            self._hints.popitem(last=False)

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        """Does nothing: no block here counts as this engine's."""

    def find(self, hashes: Sequence[bytes]) -> int:
        if (
            not self._hints
            or (first := self._hints.get(hashes[0])) is None
            or first.until <= self._clock()
        ):
            return 0
        self._is_direct = self._reaches(first.holder)
        get = self._hints.get
        for num_found, block_hash in enumerate(hashes):
            hint = get(block_hash)
            if hint is not first and (hint is None or hint.holder != first.holder):
                return num_found
        return len(hashes)

    def cost(self, num_blocks: int) -> float:
        """Seconds by the time that recent pulls took, for the blocks that `find` found; blocks that
        others wait for come first."""
        num_before = 0 if self._is_direct else self._loads.num_waiting_blocks
        return (num_before + num_blocks) * self.seconds_per_block

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = Ticket(hashes, blocks)
        hint = self._hints[hashes[0]]
        at = hint.hashes.index(hashes[0])
        self._start(
            ticket, _Origin(hint.holder, hint.owner, parent=hint.hashes[at - 1] if at else b"")
        )
        return ticket

    def load_early(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        owner: Owner,
        holder: Holder,
        parent: bytes,
    ) -> Ticket:
        """Like `load`, from an engine that may still compute the blocks: its time, and blocks that
        do not come, say nothing of pulls. Advice about these blocks stays as it is."""
        ticket = Ticket(hashes, blocks)
        self._early.add(ticket)
        self._start(ticket, _Origin(holder, owner, parent))
        return ticket

    def most_early(self, holder: Holder) -> int:
        """Blocks of early loads that may be on their way from an engine at once: half of the slots,
        as the others are for requests that wait. What comes directly needs none."""
        return sys.maxsize if self._reaches(holder) else max(1, len(self._swapper.slots) // 2)

    def save(
        self, hashes: Sequence[bytes], blocks: Sequence[int], parents: Sequence[bytes], owner: Owner
    ) -> None:
        """Other engines ask for what they want: see `BlockLeases`."""

    def launch(self) -> None:
        self._loads.launch()
        if self._direct is not None:
            self._direct.launch()

    def cancel(self, ticket: Ticket) -> None:
        if self._direct is not None and self._costs_of[ticket] is self._direct_costs:
            self._direct.cancel(ticket)
            return
        self._loads.cancel(ticket)
        for number, part in self._pulls.items():
            if part.load.ticket is ticket:
                self._link.send(PullEnd(pull=number))

    def pulled(self, answer: Pulled) -> None:
        """Takes the link's answer to a pull; a second one to the same pull does not count."""
        if (part := self._pulls.pop(answer.pull, None)) is None:
            if self._direct is not None:
                self._direct.pulled(answer)
            return
        if num_claimed := self._num_claimed(part, answer):
            namespace = self._origins[part.load.ticket].owner.namespace
            self._num_taking += 1
            self._lane.submit(partial(self._take, part, num_claimed, namespace))
        else:
            self._results.append(partial(self._note_read, part, 0))

    def placed(self, message: Placed) -> None:
        """Takes the places of a direct pull's blocks."""
        if self._direct is not None:
            self._direct.placed(message)

    def holder_left(self, holder: Holder) -> None:
        """Ends the loads from an engine with which there is no session any more."""
        if self._direct is not None:
            self._direct.left(holder)

    def poll(self) -> list[LoadEnd]:
        if not (
            self._origins or self._results or (self._direct is not None and self._direct.is_busy)
        ):
            return []
        while self._results:
            self._results.popleft()()
        direct = self._poll_direct()
        # Where copies do not take long, what was just taken is there at once.
        self._loads.launch()
        ends = [*direct, *self._loads.poll()]
        for end in ends:
            self._settle(end)
        return ends

    def close(self) -> None:
        """The link ends with the engine."""

    def _settle(self, end: LoadEnd) -> None:
        """Whatever came of it, the advice is used up: what was loaded is cached here, and the rest
        is not there."""
        del self._origins[end.ticket]
        self.num_pulled += end.num_usable
        costs = self._costs_of.pop(end.ticket)
        if end.ticket in self._early:
            self._early.remove(end.ticket)
            costs.forget(end.ticket)
            return
        for block_hash in end.ticket.hashes:
            self._hints.pop(block_hash, None)
        costs.end(end)

    def _start(self, ticket: Ticket, origin: _Origin) -> None:
        self._origins[ticket] = origin
        if self._direct is not None and self._reaches(origin.holder):
            self._begin(ticket, self._direct_costs)
            wanted = self._wanted(origin.owner, origin.parent, ticket.hashes)
            self._direct.pull(next(self._numbers), ticket, origin.holder, wanted)
        else:
            self._load_records(ticket)

    def _reaches(self, holder: Holder) -> bool:
        return self._direct is not None and self._direct.reaches(holder)

    def _begin(self, ticket: Ticket, costs: ReadCosts) -> None:
        self._costs_of[ticket] = costs
        costs.begin(ticket)

    def _load_records(self, ticket: Ticket) -> None:
        self._loads.load(ticket)
        self._begin(ticket, self._costs)

    def _poll_direct(self) -> list[LoadEnd]:
        found: list[DirectEnd] = self._direct.poll() if self._direct is not None else []
        ends = list[LoadEnd]()
        for end in found:
            hashes = end.ticket.hashes[: end.num_usable]
            is_early = end.ticket in self._early
            # An engine that has not computed blocks yet has no records of them either.
            if end.goes_by_records and not is_early:
                self._costs_of.pop(end.ticket).forget(end.ticket)
                self._load_records(end.ticket)
            elif end.is_cancelled:
                ends.append(LoadEnd(end.ticket, Outcome.CANCELLED))
            else:
                self.num_direct += len(hashes)
                self.num_discarded += 0 if is_early else len(end.ticket.hashes) - len(hashes)
                ends.append(
                    LoadEnd(end.ticket, Outcome.LOADED if hashes else Outcome.FAILED, hashes)
                )
        return ends

    def _wanted(self, owner: Owner, parent: bytes, hashes: Sequence[bytes]) -> Wanted:
        return Wanted(key=self._link.key, owner=owner, parent=parent, hashes=list(hashes))

    def _pull(self, part: Part) -> None:
        number = next(self._numbers)
        origin = self._origins[part.load.ticket]
        self._pulls[number] = part
        parent = part.load.ticket.hashes[part.start - 1] if part.start else origin.parent
        wanted = self._wanted(origin.owner, parent, part.hashes)
        rows = [self._first_row + slot for slot in part.slots]
        self._link.send(PullRequest(pull=number, holder=origin.holder, wanted=wanted, rows=rows))

    def _num_claimed(self, part: Part, answer: Pulled) -> int:
        """Leading blocks that the other engine held, of the same key and unchanged, until they were
        copied."""
        if part.load.is_cancelled or not answer.before.key == answer.after.key == self._link.key:
            return 0
        return min(
            answer.before.num_common(answer.after), num_common(answer.before.hashes, part.hashes)
        )

    def _note_taken(self, part: Part, num_read: int) -> None:
        self._num_taking -= 1
        self._note_read(part, num_read)

    def _note_read(self, part: Part, num_read: int) -> None:
        # A load that was given up has ended, and is not known as an early one any more.
        if not part.load.is_cancelled and part.load.ticket not in self._early:
            self.num_discarded += len(part.slots) - num_read
        self._loads.note_read(part, num_read)

    # The methods below run beside the step loop.

    def _take(self, part: Part, num_claimed: int, namespace: bytes) -> None:
        """Copies records to slots, as far as they are the blocks that were asked for."""
        num_read = 0
        for block_hash, slot in zip(part.hashes[:num_claimed], part.slots, strict=False):
            record = self._link.records[self._first_row + slot]
            copied = self._swapper.slots[slot]
            # First copied, then checked: nothing can change in between.
            copied[:] = record[HEADER_LEN:]
            header = bytes(record[:HEADER_LEN])
            if not self._link.seal.is_block(
                header, memoryview(copied), self._link.key, namespace, block_hash
            ):
                break
            num_read += 1
        self._results.append(partial(self._note_taken, part, num_read))
