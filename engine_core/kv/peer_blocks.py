"""The block source that pulls blocks from other engines.

A request says which engine is thought to hold the beginning of its prompt. That is advice: a pull
brings records that the cluster's secret sealed, and claims of the other engine from before and
after it copied them. A block is used only where all of that fits; the others are computed. Where
both engines are of one host, blocks are copied out of the other one's KV cache instead: see
`DirectPulls`. Knows hashes and slots; knows nothing about sockets or requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ..executor import Swapper
from ..page_groups import block_of
from ..request import Holder
from ..system.lanes import Lane, ThreadLane
from .block_record import HEADER_LEN
from .block_source import NOT_OURS, LoadEnd, OnGained, OnLost, Outcome, Owner, Ticket
from .direct_pulls import DirectEnd, DirectPulls
from .peer_link import PeerLink, Placed, Pulled, PullEnd, PullRequest, Wanted
from .prefix_hash import num_common
from .read_costs import ReadCosts
from .staged_loads import Part, StagedLoads
from .value.tier_order import NO_TURN, GivenBack

MOST_HINTS = 1 << 16
"""Blocks whose holders are remembered; the oldest go first."""
HINT_SECONDS = 60.0
"""Seconds after which a hint counts no more: its blocks have come or were computed, and its holder
may be gone."""
NO_LIMIT = 1 << 40
"""More blocks than an engine has."""
ASSUMED_BYTES_PER_SECOND = 200e6
"""Speed of a pull before the first one was measured. Two processes on two busy cores reached 250 to
300 MB/s, without the copies at either end (2026-11-23)."""


@dataclass(frozen=True, slots=True)
class _Hint:
    """Engines that probably hold the blocks of a chain. One object serves a prompt's hundreds of
    blocks."""

    holder: Holder
    owner: Owner
    hashes: Sequence[bytes]
    """Hashes of the chain, from its first block on."""
    until: float
    """Time from which on the hint no longer counts."""


class _Hints:
    """Hints about other engines' blocks, by hash."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of_block: OrderedDict[bytes, _Hint] = OrderedDict()

    def note(self, hashes: Sequence[bytes], owner: Owner, holder: Holder) -> None:
        """Another engine is thought to hold these blocks, the first of a chain."""
        hint = _Hint(holder, owner, hashes, self._clock() + HINT_SECONDS)
        for block_hash in hashes:
            self._of_block[block_hash] = hint
            self._of_block.move_to_end(block_hash)
        while len(self._of_block) > MOST_HINTS:
            self._of_block.popitem(last=False)

    def find(self, hashes: Sequence[bytes]) -> tuple[Holder, int] | None:
        """The engine that is thought to hold the first block, and how many leading ones it is
        thought to hold."""
        get = self._of_block.get
        first = get(hashes[0])
        if first is None or first.until <= self._clock():
            return None
        for num_found, block_hash in enumerate(hashes):
            hint = get(block_hash)
            if hint is not first and (hint is None or hint.holder != first.holder):
                return first.holder, num_found
        return first.holder, len(hashes)

    def origin(self, block_hash: bytes) -> _Origin:
        """Origin of the blocks from this one on, as `find` noted it."""
        hint = self._of_block[block_hash]
        at = hint.hashes.index(block_hash)
        return _Origin(hint.holder, hint.owner, block_of(hint.hashes[at - 1]) if at else b"")

    def forget(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._of_block.pop(block_hash, None)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Source of a load's blocks, and the hash before the first one."""

    holder: Holder
    owner: Owner
    parent: bytes


@dataclass(slots=True)
class _Load:
    """A load that has not ended."""

    origin: _Origin
    costs: ReadCosts
    """Measured costs of the way by which it is pulled."""
    is_early: bool
    """Whether the holder may still compute its blocks."""


class _RecordReader:
    """Copies records that came from their rows to slots, beside the step loop."""

    def __init__(self, swapper: Swapper, link: PeerLink, first_row: int, lane: Lane) -> None:
        """See `PeerBlocks`."""
        self._slots = swapper.slots
        self._link = link
        self._first_row = first_row
        self._lane = lane
        self._num_reading = 0
        self._read: deque[tuple[Part, int]] = deque()

    @property
    def is_busy(self) -> bool:
        return self._num_reading > 0

    def rows_of(self, part: Part) -> list[int]:
        """Rows that records of the part are received in."""
        return [self._first_row + slot for slot in part.slots]

    def begin(self, part: Part, num_claimed: int, namespace: bytes) -> None:
        self._num_reading += 1
        self._lane.submit(lambda: self._copy(part, num_claimed, namespace))

    def skip(self, part: Part) -> None:
        """Notes that no block of the part arrives."""
        self._num_reading += 1
        self._read.append((part, 0))

    def ended(self) -> Iterator[tuple[Part, int]]:
        """Parts that have been read, each once, with the number of leading blocks that are
        valid."""
        while self._read:
            self._num_reading -= 1
            yield self._read.popleft()

    # The method below runs beside the step loop.

    def _copy(self, part: Part, num_claimed: int, namespace: bytes) -> None:
        """Copies records to slots, as far as they are the blocks that were asked for."""
        num_read = 0
        rows = self.rows_of(part)
        for block_hash, slot, row in zip(part.hashes[:num_claimed], part.slots, rows, strict=False):
            record = self._link.records[row]
            copied = self._slots[slot]
            # First copied, then checked: nothing can change in between.
            copied[:] = record[HEADER_LEN:]
            header = bytes(record[:HEADER_LEN])
            if not self._link.seal.is_block(
                header, memoryview(copied), self._link.key, namespace, block_hash
            ):
                break
            num_read += 1
        self._read.append((part, num_read))


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
    ) -> None:
        """`swapper` has a slot for each of the link's rows from `first_row` on."""
        self._swapper = swapper
        self._link = link
        self._reader = _RecordReader(swapper, link, first_row, ThreadLane("kv-pull"))
        self._hints = _Hints(clock)
        self._loads = StagedLoads(swapper, deque(range(len(swapper.slots))), self._pull)
        self._under_way: dict[Ticket, _Load] = {}
        self._pulls: dict[int, Part] = {}
        """Pulls by number that the link has not answered."""
        self._numbers = count(1)
        self._costs = ReadCosts(clock)
        self._direct_costs = ReadCosts(clock)
        self._costs.assume(swapper.slots.shape[1] / ASSUMED_BYTES_PER_SECOND)
        self._direct: DirectPulls | None = None
        if (copies := swapper.direct_copies) is not None:
            self._direct = DirectPulls(copies, link)
            self._direct_costs.assume(copies.seconds_per_block)
        self._is_direct = False
        """Whether the way to the engine that `find` spoke of last is direct."""
        self.num_pulled = self.num_direct = self.num_discarded = 0
        """Numbers of blocks that arrived and were used, of those that were copied directly, and of
        those that were requested and not received intact."""

    @property
    def has_background_work(self) -> bool:
        """Whether slots of cancelled loads are still to be freed."""
        return self._reader.is_busy

    @property
    def seconds_per_block(self) -> float:
        """Lately, from the pull to the device, by the way to the engine that was looked at last."""
        if self._is_direct:
            return self._direct_costs.seconds_per_block
        return self._costs.seconds_per_block + self._swapper.seconds_per_block

    def expect(self, hashes: Sequence[bytes], owner: Owner, holder: Holder) -> None:
        """Notes that another engine probably holds these blocks, the first of a chain, and the
        pages needed to continue them."""
        self._hints.note(hashes, owner, holder)

    def connect(self, on_lost: OnLost, on_gained: OnGained) -> None:
        """Does nothing: no block here counts as this engine's."""

    def find(self, hashes: Sequence[bytes]) -> int:
        found = self._hints.find(hashes)
        if found is None:
            return 0
        holder, num_found = found
        self._is_direct = self._reaches(holder)
        return num_found

    def cost(self, num_blocks: int) -> float:
        """Seconds predicted from recent pulls for the blocks that `find` found; loads that requests
        wait for come first."""
        num_before = 0 if self._is_direct else self._loads.num_waiting_blocks
        return (num_before + num_blocks) * self.seconds_per_block

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        ticket = Ticket(hashes, blocks)
        self._start(ticket, self._hints.origin(hashes[0]), is_early=False)
        return ticket

    def load_early(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        owner: Owner,
        holder: Holder,
        parent: bytes,
    ) -> Ticket:
        """Like `load`, from an engine that may still compute the blocks: its time, and missing
        blocks, do not count in predictions. Hints about these blocks stay."""
        ticket = Ticket(hashes, blocks)
        self._start(ticket, _Origin(holder, owner, parent), is_early=True)
        return ticket

    def most_early(self, holder: Holder) -> int:
        """Most blocks of early loads from one engine in flight at once: half of the slots, since
        the others are for requests that wait. Direct copies need no slots."""
        return NO_LIMIT if self._reaches(holder) else max(1, len(self._swapper.slots) // 2)

    def save(
        self,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        parents: Sequence[bytes],
        owner: Owner,
        given: GivenBack = NO_TURN,
    ) -> None:
        """Does nothing: other engines ask for the blocks that they want, see `BlockLeases`."""

    def launch(self) -> None:
        self._loads.launch()
        if self._direct is not None:
            self._direct.launch()

    def cancel(self, ticket: Ticket) -> None:
        if self._direct is not None and self._under_way[ticket].costs is self._direct_costs:
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
            namespace = self._under_way[part.load.ticket].origin.owner.namespace
            self._reader.begin(part, num_claimed, namespace)
        else:
            self._reader.skip(part)

    def placed(self, message: Placed) -> None:
        """Takes the places of a direct pull's blocks."""
        if self._direct is not None:
            self._direct.placed(message)

    def holder_left(self, holder: Holder) -> None:
        """Ends the loads from an engine whose session has ended."""
        if self._direct is not None:
            self._direct.left(holder)

    def poll(self) -> list[LoadEnd]:
        is_direct_busy = self._direct is not None and self._direct.is_busy
        if not (self._under_way or self._reader.is_busy or is_direct_busy):
            return []
        for part, num_read in self._reader.ended():
            self._note_read(part, num_read)
        direct = self._poll_direct()
        # On devices that copy within the call, what was just received can be used at once.
        self._loads.launch()
        ends = [*direct, *self._loads.poll()]
        for end in ends:
            self._settle(end)
        return ends

    def close(self) -> None:
        """Does nothing: the link to other engines ends with the engine."""

    def _settle(self, end: LoadEnd) -> None:
        """Removes the hint after a load, whatever its result: loaded blocks are cached here, and
        the others do not exist there."""
        load = self._under_way.pop(end.ticket)
        self.num_pulled += end.num_blocks
        if load.is_early:
            load.costs.forget(end.ticket)
            return
        self._hints.forget(end.ticket.hashes)
        load.costs.end(end)

    def _start(self, ticket: Ticket, origin: _Origin, *, is_early: bool) -> None:
        load = self._under_way[ticket] = _Load(origin, self._costs, is_early)
        if self._direct is not None and self._reaches(origin.holder):
            load.costs = self._direct_costs
            load.costs.begin(ticket)
            wanted = self._wanted(origin.owner, origin.parent, ticket.hashes)
            self._direct.pull(next(self._numbers), ticket, origin.holder, wanted)
        else:
            self._load_records(ticket)

    def _reaches(self, holder: Holder) -> bool:
        return self._direct is not None and self._direct.reaches(holder)

    def _load_records(self, ticket: Ticket) -> None:
        self._loads.load(ticket)
        self._costs.begin(ticket)

    def _poll_direct(self) -> list[LoadEnd]:
        found: list[DirectEnd] = self._direct.poll() if self._direct is not None else []
        ends = list[LoadEnd]()
        for end in found:
            hashes = end.ticket.hashes[: end.num_usable]
            load = self._under_way[end.ticket]
            # An engine that has not computed blocks yet has no records of them either.
            if end.goes_by_records and not load.is_early:
                load.costs.forget(end.ticket)
                load.costs = self._costs
                self._load_records(end.ticket)
            elif end.is_cancelled:
                ends.append(LoadEnd(end.ticket, Outcome.CANCELLED))
            else:
                outcome = Outcome.LOADED if hashes else Outcome.FAILED
                ends.append(LoadEnd(end.ticket, outcome, hashes))
                num_blocks = ends[-1].num_blocks
                self.num_direct += num_blocks
                self.num_discarded += 0 if load.is_early else end.ticket.num_blocks - num_blocks
        return ends

    def _wanted(self, owner: Owner, parent: bytes, hashes: Sequence[bytes]) -> Wanted:
        return Wanted(key=self._link.key, owner=owner, parent=parent, hashes=list(hashes))

    def _pull(self, part: Part) -> None:
        number = next(self._numbers)
        origin = self._under_way[part.load.ticket].origin
        self._pulls[number] = part
        parent = origin.parent
        if part.start:
            parent = block_of(part.load.ticket.hashes[part.start - 1])
        wanted = self._wanted(origin.owner, parent, part.hashes)
        rows = self._reader.rows_of(part)
        self._link.send(PullRequest(pull=number, holder=origin.holder, wanted=wanted, rows=rows))

    def _num_claimed(self, part: Part, answer: Pulled) -> int:
        """Number of leading blocks that the other engine had, with the same key and unchanged,
        until they were copied."""
        if part.load.is_cancelled or not answer.before.key == answer.after.key == self._link.key:
            return 0
        return min(
            answer.before.num_common(answer.after), num_common(answer.before.hashes, part.hashes)
        )

    def _note_read(self, part: Part, num_read: int) -> None:
        # A cancelled early load has ended, and is no longer known.
        load = self._under_way.get(part.load.ticket)
        if not part.load.is_cancelled and (load is None or not load.is_early):
            self.num_discarded += part.num_blocks_behind(num_read)
        self._loads.note_read(part, num_read)
