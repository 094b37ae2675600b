"""Engines that pull blocks from each other, and a link between them that loses, tears, doubles or
delays copies, or brings stale or foreign ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import UInt8Array
from headwater.engine_core.executors.model import shared_kv
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.kv import block_leases, peer_blocks
from headwater.engine_core.kv.block_leases import BlockLeases
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockId, BlockSeal, kv_key
from headwater.engine_core.kv.block_source import Ticket
from headwater.engine_core.kv.disk import disk_blocks
from headwater.engine_core.kv.peer_blocks import PeerBlocks
from headwater.engine_core.kv.peer_link import (
    Claim,
    HolderLeft,
    LeaseCopied,
    LeaseEnd,
    LeaseRequest,
    Lent,
    PeerLink,
    Placed,
    Places,
    PullCopied,
    Pulled,
    PullEnd,
    PullRequest,
    ToLink,
)
from headwater.engine_core.kv.published_blocks import BlocksView, PublishedBlocks, UInt64Array
from headwater.engine_core.request import NewRequest
from headwater.engine_core.scheduling.blocks.prefetches import Prefetches
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.waits_for import WaitsFor
from tests.simulation.files_twin import FilesTwin
from tests.simulation.tier_faults import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    FaultyLane,
    Pages,
    in_place_of_threads,
)

BLOCK_BYTES = 8 * BLOCK_SIZE
KEY = kv_key("simulated", BLOCK_SIZE, BLOCK_BYTES)
FOREIGN_KEY = kv_key("other weights", BLOCK_SIZE, BLOCK_BYTES)
FAULTS = (
    "lost",
    "torn",
    "stale",
    "foreign",
    "doubled",
    "outlived",
    "overwritten",
    "half",
    "reborn",
)
"""In a direct pull, "torn" and "stale" change what the other engine claims before the copy,
"foreign" is a cache that cannot be opened, and where the other engine "reborn" names what it
publishes, its predecessor's memory is found."""


@dataclass(slots=True)
class Answer:
    new: NewRequest
    tokens: list[int] = field(default_factory=list)
    has_ended: bool = False


@dataclass(slots=True)
class Transfer:
    """A pull on its way."""

    puller: Replica
    owner: Replica
    request: PullRequest
    lease: int
    fault: str
    is_placed: bool = False
    is_answered: bool = False


class RacedView(BlocksView):
    """The owner goes on while this view of its blocks is read."""

    def __init__(self, handle: bytes, race: Callable[[], None]) -> None:
        super().__init__(handle)
        self._race = race

    def _read(self, column: UInt64Array) -> UInt64Array:
        found = super()._read(column)
        self._race()
        return found


class Replica:
    """One incarnation of an engine. What is sent to a dead one is lost."""

    def __init__(
        self,
        number: int,
        epoch: int,
        rng: random.Random,
        link: LinkTwin,
        *,
        is_direct: bool,
        publishes: bool,
        pages: Pages,
    ) -> None:
        """`is_direct`: whether others may copy out of its KV cache, and it out of theirs;
        `publishes`: whether they need not ask what is in it."""
        self.number = number
        self.epoch = epoch
        self.is_alive = True
        num_spare = rng.choice([0, 0, 3, 9])
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            page_windows=pages.windows,
            state_pages=pages.state_pages,
            num_blocks=1000,
            num_peer_blocks=rng.choice([2, 5, 12]) * pages.pages_a_block,
            shares_kv_cache=is_direct,
            num_host_blocks=rng.choice([0, 0, 2, 4]) * pages.pages_a_block,
            num_staged_blocks=rng.choice([0, 4, 12]) * pages.pages_a_block,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=rng.choice([1, 3, 6]),
            spare_rows=rng.choice([0, 2]),
            max_num_batched_tokens=rng.choice([20, 60, 200]),
            async_depth=rng.randint(1, 4),
        )
        num_blocks = self.config.fewest_blocks + num_spare * len(pages.windows)
        self.config = replace(self.config, num_blocks=num_blocks)
        timing = SimulatedTiming(late_polls=rng.choice([0, 2]))
        self.lanes = [
            FaultyLane(rng, in_order=each == "writes")
            for each in ("direct", "pulls", "lends", "writes", "reads")
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_kv, "ThreadLane", in_place_of_threads(self.lanes[0]))
            self.executor = SimulatedExecutor(self.config, pages.model, timing, verify_every=1)
        self.records: UInt8Array = np.zeros(
            (self.config.num_peer_blocks, HEADER_LEN + BLOCK_BYTES), np.uint8
        )
        num_files = rng.choice([5, 20]) * pages.pages_a_block
        self.files = FilesTwin(num_files, rng, fault_chance=rng.choice([0.0, 0.6]))
        peer_link = PeerLink(
            key=KEY,
            seal=BlockSeal(),
            records=self.records,
            send=lambda message: link.send(self, message),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_blocks, "ThreadLane", in_place_of_threads(self.lanes[1]))
            patch.setattr(block_leases, "ThreadLane", in_place_of_threads(self.lanes[2]))
            patch.setattr(disk_blocks, "ThreadLane", in_place_of_threads(*self.lanes[3:]))
            if not publishes:
                patch.setattr(PublishedBlocks, "of", lambda *_: None)
            self.engine = Engine(
                self.config,
                self.executor,
                clock=lambda: float(link.now),
                disk_files=self.files if self.config.num_staged_blocks else None,
                peer_link=peer_link,
            )
        if self.peers._direct is not None:
            self.peers._direct._open_view = partial(RacedView, race=partial(link.race, self))
        self.answers: dict[int, Answer] = {}
        self._ended_prefetches: dict[int, list[Ticket]] = {}
        """With the loads that were on their way when it was ended."""

    @property
    def peers(self) -> PeerBlocks:
        assert self.engine._tiers.peers is not None
        return self.engine._tiers.peers

    @property
    def leases(self) -> BlockLeases:
        assert self.engine._tiers.leases is not None
        return self.engine._tiers.leases

    @property
    def has_work(self) -> bool:
        return self.engine.waits_for is not WaitsFor.WORK

    @property
    def prefetches(self) -> Prefetches:
        return self.engine._scheduler.blocks._prefetches

    def end_prefetch(self, number: int) -> None:
        if (prefetch := self.prefetches._open.get(number)) is not None:
            self._ended_prefetches.setdefault(number, list(prefetch.tickets))
        self.engine.end_prefetch(number)

    def step(self, rng: random.Random) -> None:
        for lane in self.lanes:
            lane.run(rng.choice([0, 1, 30]))
        if self.has_work and (output := self.engine.step()) is not None:
            self._receive(output)

    def _receive(self, output: StepOutput) -> None:
        tokens = iter(output.token_ids)
        for key, first, num_tokens in zip(
            output.keys, output.first_index, output.num_tokens, strict=True
        ):
            answer = self.answers[key]
            assert first == len(answer.tokens), "a token twice, or none"
            answer.tokens += [next(tokens) for _ in range(num_tokens)]
        for finished in output.finishes:
            assert not self.answers[finished.key].has_ended, "two ends"
            self.answers[finished.key].has_ended = True

    def check_blocks(self) -> None:
        """Blocks are held by rows, by loads, by leases and by copies in flight, and by nobody
        else."""
        scheduler = self.engine._scheduler
        blocks = scheduler.blocks
        held = Counter([*blocks._forks.held_pages, *self.leases.pinned_blocks])
        for row, request in enumerate(scheduler.rows.table.requests):
            if request is not None:
                held.update(blocks.pages_of(row))
        for load in blocks._loads._open.values():
            held.update(load.held.pages + load.here + load.blocks)
        counts = blocks._pool.ref_counts
        assert [held[block] for block in range(self.config.num_blocks)] == counts, (
            "blocks are not conserved"
        )
        by_records = [
            ticket
            for prefetch in self.prefetches._open.values()
            for ticket in prefetch.tickets
            if (pull := self.peers._under_way.get(ticket)) and pull.costs is self.peers._costs
        ]
        most = max(1, len(self.peers._swapper.slots) // 2)
        num_loading = sum(len(ticket.blocks) for ticket in by_records)
        assert num_loading <= most, "prefetches have more blocks than their share on their way"
        for number, tickets in self._ended_prefetches.items():
            left = (
                [] if (prefetch := self.prefetches._open.get(number)) is None else prefetch.tickets
            )
            assert all(ticket in tickets for ticket in left), "a prefetch that was ended goes on"
        for slots in (self.peers._loads._free_slots, self.leases._free_slots):
            assert len(set(slots)) == len(slots), "a slot is free twice"

    def check_end(self) -> None:
        self.check_blocks()
        load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0), (
            "blocks are left"
        )
        num_free = len(self.peers._loads._free_slots) + len(self.leases._free_slots)
        assert num_free == self.config.num_peer_blocks, "slots are left"
        assert not len(self.prefetches), "prefetches are left"
        assert not any(pull.is_early for pull in self.peers._under_way.values()), (
            "early loads are left"
        )


def turned(claim: Claim) -> Claim:
    """The same blocks, the last one first."""
    return Claim(key=claim.key, hashes=claim.hashes[::-1], generations=claim.generations[::-1])


class LinkTwin:
    """What lies between the engines: servers, connections, and all that befalls them."""

    def __init__(
        self, rng: random.Random, race_rng: random.Random, *, fault_chance: float, most_delay: int
    ) -> None:
        """`race_rng`: draws what happens while an engine reads what another one publishes."""
        self._rng = rng
        self._fault_chance = fault_chance
        self._most_delay = most_delay
        self.now = 0
        self.replicas: list[Replica] = []
        self.faults = Counter[str]()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._leases = count(1)
        self._transfers: dict[int, Transfer] = {}
        """By lease."""
        self._old_records: list[UInt8Array] = []
        self._ended: set[tuple[int, int]] = set()
        """Pulls that nobody waits for any more, by incarnation and number."""
        self._race_rng = race_rng
        self._is_racing = False
        self._dead_handles: dict[int, list[bytes]] = {}
        """By number of each engine, of what its predecessors published."""
        self.num_direct = 0
        """Pulls that were told places."""
        self.num_ahead = self.num_compared = 0
        """Pulls that copied before they were told places, and those that needed no second claim."""

    @property
    def is_idle(self) -> bool:
        return not self._due

    def advance(self) -> None:
        self.now += 1
        due = sorted(each for each in self._due if each[0] <= self.now)
        self._due = [each for each in self._due if each[0] > self.now]
        for _, _, event in due:
            event()

    def died(self, dead: Replica) -> None:
        """Its connections break: pulls from it end, and leases that it had."""
        if (leases := dead.leases._direct) is not None and leases._published is not None:
            self._dead_handles.setdefault(dead.number, []).append(leases._published.handle)
        for transfer in list(self._transfers.values()):
            if dead is transfer.owner:
                self._answer(transfer, Claim(), Claim())
                left = HolderLeft(holder=transfer.request.holder)
                self._later(partial(transfer.puller.engine.take, left))
            elif dead is transfer.puller:
                self._end_lease(transfer)

    def send(self, sender: Replica, message: ToLink) -> None:
        match message:
            case PullRequest():
                self._later(lambda: self._ask(sender, message))
            case PullEnd(pull=pull, num_copied=num_copied):
                self._ended.add((sender.epoch, pull))
                self.num_compared += num_copied > 0
                for transfer in list(self._transfers.values()):
                    if transfer.puller is sender and transfer.request.pull == pull:
                        self.num_ahead += num_copied > 0 and not transfer.is_placed
                        self._answer(transfer, Claim(), Claim(), num_copied)
            case PullCopied(pull=pull):
                for transfer in self._transfers.values():
                    if transfer.puller is sender and transfer.request.pull == pull:
                        copied = LeaseCopied(lease=transfer.lease)
                        self._later(partial(transfer.owner.engine.take, copied))
            case Lent(places=Places()):
                if (found := self._transfers.get(message.lease)) is not None:
                    self._later(partial(self._place, found, message))
            case Lent():
                if (found := self._transfers.get(message.lease)) is not None:
                    self._later(partial(self._carry, found, message))

    def _later(self, event: Callable[[], None]) -> None:
        self._due.append(
            (self.now + 1 + self._rng.randint(0, self._most_delay), next(self._order), event)
        )

    def _ask(self, puller: Replica, request: PullRequest) -> None:
        if puller not in self.replicas:
            # What it asked was lost with it.
            return
        owner = self.replicas[int(request.holder.address)]
        fault = self._rng.choice(FAULTS) if self._rng.random() < self._fault_chance else ""
        transfer = Transfer(puller, owner, request, next(self._leases), fault)
        self.faults[fault] += 1
        has_ended = (puller.epoch, request.pull) in self._ended
        if has_ended or owner.epoch != request.holder.epoch or fault == "lost":
            self._answer(transfer, Claim(), Claim())
            return
        self._transfers[transfer.lease] = transfer
        lease = LeaseRequest(
            lease=transfer.lease, wanted=request.wanted, is_direct=request.is_direct
        )
        owner.engine.take(lease)
        if fault == "outlived":
            # The owner hears nothing of the puller and ends the lease; what was copied by then
            # still arrives.
            self._later(lambda: owner.engine.take(LeaseEnd(lease=transfer.lease)))
            self._later(lambda: self._later(lambda: self._answer(transfer, Claim(), Claim())))

    def _place(self, transfer: Transfer, lent: Lent) -> None:
        if transfer.is_answered:
            return
        before = lent.before
        places = lent.places
        assert places is not None
        self.num_direct = self.num_direct + 1
        transfer.is_placed = True
        if transfer.fault == "reborn":
            places = replace(
                places, published=self._of_predecessor(transfer.owner, places.published)
            )
        if transfer.fault == "foreign":
            places = replace(places, handle=b"")
        elif transfer.fault == "torn":
            before = Claim(
                key=before.key, hashes=before.hashes[:1], generations=before.generations[:1]
            )
        elif transfer.fault == "stale":
            before = turned(before)
            places = replace(places, blocks=places.blocks[::-1])
        placed = Placed(pull=transfer.request.pull, before=before, places=places)
        direct = transfer.puller.peers._direct
        assert direct is not None
        pull = direct._pulls.get(placed.pull)
        self.num_ahead += pull is not None and pull.copy is not None
        transfer.puller.engine.take(placed)
        if transfer.fault == "doubled":
            transfer.puller.engine.take(placed)

    def _carry(self, transfer: Transfer, lent: Lent) -> None:
        if transfer.is_answered:
            return
        self._copy(transfer, lent)
        after = lent.after
        if transfer.fault == "half":
            after = Claim(key=after.key, hashes=after.hashes[:1], generations=after.generations[:1])
        if transfer.fault == "stale" and transfer.request.is_direct:
            lent = replace(lent, before=turned(lent.before))
            after = turned(after)
        if transfer.fault == "overwritten":
            after = replace(after, generations=[number + 1 for number in after.generations])
        self._answer(transfer, lent.before, after)
        if transfer.fault == "doubled":
            again = Pulled(pull=transfer.request.pull, before=lent.before, after=lent.after)
            self._later(lambda: transfer.puller.engine.take(again))

    def _copy(self, transfer: Transfer, lent: Lent) -> None:
        wanted = transfer.request.wanted
        rows = transfer.puller.records
        for number, (source, target) in enumerate(
            zip(lent.rows, transfer.request.rows, strict=False)
        ):
            rows[target] = record = transfer.owner.records[source]
            self._old_records.append(record.copy())
            if transfer.fault == "torn":
                rows[target][self._rng.randrange(record.size) :] = 0xDE
            elif transfer.fault == "stale":
                rows[target] = self._rng.choice(self._old_records)
            elif transfer.fault == "foreign":
                payload = self._rng.randbytes(BLOCK_BYTES)
                block = BlockId(
                    FOREIGN_KEY, wanted.owner.namespace, wanted.hashes[number], wanted.parent
                )
                rows[target] = np.frombuffer(
                    BlockSeal().header_of(block, payload) + payload, np.uint8
                )

    def _of_predecessor(self, owner: Replica, handle: bytes) -> bytes:
        """A handle under which the memory of a dead engine is found, as where the number of its
        process is the successor's by then."""
        handles = self._dead_handles.get(owner.number)
        if not handle or not handles:
            return handle
        dead = json.loads(self._race_rng.choice(handles))
        return json.dumps(dead | {"token": json.loads(handle)["token"]}).encode()

    def race(self, reader: Replica) -> None:
        """The other engines take some steps in the middle of a step of `reader`."""
        if self._is_racing or self._race_rng.random() < 0.7:
            return
        self._is_racing = True
        for replica in self.replicas:
            for _ in range(self._race_rng.choice([1, 3, 9]) if replica is not reader else 0):
                replica.step(self._race_rng)
        self._is_racing = False

    def _answer(self, transfer: Transfer, before: Claim, after: Claim, num_copied: int = 0) -> None:
        """Once for each pull, whatever becomes of it."""
        if transfer.is_answered:
            return
        transfer.is_answered = True
        answer = Pulled(pull=transfer.request.pull, before=before, after=after)
        self._later(lambda: transfer.puller.engine.take(answer))
        self._end_lease(transfer, num_copied)

    def _end_lease(self, transfer: Transfer, num_copied: int = 0) -> None:
        if self._transfers.pop(transfer.lease, None) is not None:
            end = LeaseEnd(lease=transfer.lease, num_copied=num_copied)
            self._later(lambda: transfer.owner.engine.take(end))
