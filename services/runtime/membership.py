"""The live table of processes by kind, from heartbeats on the bus and from seeds that are asked
over gRPC.

A process leaves by its last heartbeat, or when it is silent on the bus, or the bus is away, and it
does not answer over gRPC either. One that is reached by two addresses is one member, by the first
of them that answers. Knows nothing about the work of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum

import structlog

from headwater.proto import events_pb2

from . import subjects
from .bus import Bus, Subscription
from .listeners import call_each
from .member import Kind, Member
from .prober import Prober
from .seeds import Resolve, Seeds, Target, resolved
from .tasks import owned_task

EXPIRY_SECONDS = 4.0
"""Seconds of silence after which a process is gone."""
_SWEEP_SECONDS = 0.5
_PROBE_EVERY = 2
"""Number of sweeps between two probes."""
_PROBE_FAILURES = 2
"""Number of failures in a row after which a process is gone; one may be a hiccup."""


class ChangeKind(Enum):
    JOINED = "joined"
    UPDATED = "updated"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Change:
    """Kind of a change. A restarted process leaves as one incarnation and joins as another."""

    kind: ChangeKind
    member: Member


@dataclass(slots=True)
class _Entry:
    member: Member
    seen: float
    from_bus: bool
    num_failures: int = 0
    other_address: str = ""
    """Second address of the process: the advertised address, or the address of a seed. Empty if it
    has one address."""
    is_seen_there: bool = False
    """Whether the process was heard of by its other address since the member's failed to answer."""


class Members:
    """Table of processes. Use within `running`; read with `of` and `get`, follow with `on_change`
    or `wait_for`."""

    def __init__(
        self,
        bus: Bus,
        kinds: Iterable[Kind],
        seeds: Mapping[Kind, Sequence[str]] | None = None,
        *,
        saved: Iterable[Member] = (),
        resolve: Resolve = resolved,
        probers: Callable[[], AbstractAsyncContextManager[Prober]] = Prober.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seeds` are addresses (host:port) that are asked whether or not there is a bus; `saved`
        are members of an earlier life, which are asked until there is one."""
        self._bus = bus
        self._probers = probers
        self._clock = clock
        self._kinds = frozenset(kinds)
        self._seeds = Seeds(seeds or {}, resolve=resolve)
        self._saved: defaultdict[Target, list[Member]] = defaultdict(list)
        for member in saved:
            self._saved[member.kind, member.address].append(member)
        self._asked: frozenset[Target] = frozenset()
        self._table: dict[tuple[Kind, str], _Entry] = {}
        self._retired: deque[tuple[str, int]] = deque(maxlen=1024)
        self._listeners: list[Callable[[Change], None]] = []
        self._changed = asyncio.Event()
        self._readable_since: float | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Members]:
        """Follows the membership inside the `with` block; members on the bus are known milliseconds
        later."""
        async with (
            self._bus.subscribe(subjects.EVERY_MEMBER) as heartbeats,
            self._seeds.running(),
            self._probers() as prober,
        ):
            reconnected = asyncio.Event()
            self._bus.on_connected(reconnected.set)
            reconnected.set()
            async with (
                owned_task(self._read(heartbeats)),
                owned_task(self._greet_members(reconnected)),
                owned_task(self._sweep(prober)),
            ):
                yield self

    def of(self, kind: Kind, model_key: str | None = None) -> list[Member]:
        """Members of a kind, and of one model where `model_key` is given, in the order of
        joining."""
        return [
            entry.member
            for (each, _), entry in self._table.items()
            if each is kind and model_key in (None, entry.member.model_key)
        ]

    def everyone(self) -> list[Member]:
        """Members of all kinds that are followed."""
        return [entry.member for entry in self._table.values()]

    def get(self, kind: Kind, replica_id: str) -> Member | None:
        entry = self._table.get((kind, replica_id))
        return entry.member if entry is not None else None

    def on_change(self, listener: Callable[[Change], None]) -> None:
        """Calls `listener` for each join, leave and change, beginning with a join of every known
        member."""
        self._listeners.append(listener)
        for entry in list(self._table.values()):
            call_each([listener], Change(ChangeKind.JOINED, entry.member))

    def forget_listener(self, listener: Callable[[Change], None]) -> None:
        self._listeners.remove(listener)

    async def wait_for(self, condition: Callable[[Members], bool]) -> None:
        """Returns when the condition holds for the table."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    def on_member(self, member: Member, *, from_bus: bool) -> None:
        """Takes the description that a process published, or that a probe found."""
        key = (member.kind, member.replica_id)
        if member.kind not in self._kinds or (member.replica_id, member.epoch) in self._retired:
            return
        known = self._table.get(key)
        if member.leaving:
            if known is not None and known.member.epoch == member.epoch:
                self._retire(key)
            return
        if known is not None and known.member.epoch != member.epoch:
            self._retire(key)
            known = None
        previous = known.member if known is not None else None
        entry = _Entry(member, self._clock(), from_bus)
        if known is not None:
            self._go_on(entry, known)
        self._table[key] = entry
        member = entry.member
        if previous is None:
            self._emit(ChangeKind.JOINED, member)
        elif previous != member or member.load is not None:
            self._emit(ChangeKind.UPDATED, member)
        # After the join, so that a connection to the address is kept.
        self._drop_seed_of(member)

    def _go_on(self, entry: _Entry, known: _Entry) -> None:
        """Keeps the state of a known process. Its address does not change, since connections to it
        are open; a report from another address is ignored."""
        is_elsewhere = entry.member.address != known.member.address
        is_answer_there = not (entry.from_bus or is_elsewhere)
        entry.from_bus = entry.from_bus or known.from_bus
        entry.other_address = entry.member.address if is_elsewhere else known.other_address
        if entry.other_address and not is_answer_there:
            entry.num_failures = known.num_failures
            entry.is_seen_there = known.is_seen_there or is_elsewhere
        if is_elsewhere:
            entry.member = dataclasses.replace(entry.member, address=known.member.address)

    def _drop_seed_of(self, member: Member) -> None:
        """Removes the seed of a process that was known by its address only and now introduces
        itself."""
        nameless = (member.kind, member.address)
        if member.replica_id != member.address and nameless in self._table:
            self._remove(nameless)

    def _retire(self, key: tuple[Kind, str]) -> None:
        """Removes an incarnation that never comes back; late messages of it are ignored."""
        member = self._table[key].member
        if member.epoch:
            self._retired.append((member.replica_id, member.epoch))
        self._remove(key)

    def _remove(self, key: tuple[Kind, str]) -> None:
        self._emit(ChangeKind.LEFT, self._table.pop(key).member)

    def _emit(self, kind: ChangeKind, member: Member) -> None:
        if kind is not ChangeKind.UPDATED:
            structlog.get_logger().info(
                f"member {kind.value}",
                kind=member.kind.value,
                replica=member.replica_id,
                address=member.address,
            )
        self._changed.set()
        call_each(self._listeners, Change(kind, member))

    async def _read(self, heartbeats: Subscription) -> None:
        def read(payload: bytes) -> Member:
            return Member.from_pb(events_pb2.Member.FromString(payload))

        async for subject, member in heartbeats.decoded(read, "heartbeat"):
            if subject != subjects.member(member.kind.value, member.replica_id):
                structlog.get_logger().warning("heartbeat of another member", subject=subject)
                continue
            self.on_member(member, from_bus=True)

    async def _greet_members(self, reconnected: asyncio.Event) -> None:
        while True:
            await reconnected.wait()
            reconnected.clear()
            await self._bus.publish(subjects.HELLO, b"")

    async def _sweep(self, prober: Prober) -> None:
        for turn in itertools.count():
            if turn % _PROBE_EVERY == 0:
                await self._probe(prober)
            before = self._clock()
            await asyncio.sleep(_SWEEP_SECONDS)
            now = self._clock()
            if not self._bus.connected or now - before > 2 * _SWEEP_SECONDS:
                # No message could arrive, or this process itself was held up: silence means nothing
                # yet.
                self._readable_since = None
            elif self._readable_since is None:
                self._readable_since = now
            else:
                self._expire(now, self._readable_since)

    def _expire(self, now: float, readable_since: float) -> None:
        """Probes members that are silent on the bus; one that does not answer the first time is
        gone."""
        for entry in self._table.values():
            if entry.from_bus and now - max(entry.seen, readable_since) > EXPIRY_SECONDS:
                entry.from_bus = False
                entry.num_failures = _PROBE_FAILURES - 1
                entry.is_seen_there = False

    async def _probe(self, prober: Prober) -> None:
        """Probes every seed and every member that the bus does not bring; while the bus is away,
        that is every member."""
        asked = self._to_ask()
        before = self._asked
        self._asked = asked
        for _, address in before - asked:
            await prober.forget(address)
        order = list(asked)
        answers = await asyncio.gather(*(prober.probe(kind, address) for kind, address in order))
        for target, answer in zip(order, answers, strict=True):
            self._on_answer(target, answer)

    def _on_answer(self, target: Target, answer: Member | None) -> None:
        """Handles the answer to a probe. A member that is silent on the bus is gone if another
        process has its address: engines identify themselves, other stages do by heartbeats."""
        if answer is not None and (answer.epoch or not self._at(*target)):
            # Facts that the bus or an earlier epoch reported are better than a bare address.
            for each in [answer] if answer.epoch else self._saved.get(target, [answer]):
                self.on_member(each, from_bus=False)
        entries = self._at(*target)
        epochs = {entry.member.epoch for entry in entries}
        present = {entry.member.epoch for entry in entries if self._sends_heartbeats(entry)}
        living = set() if answer is None else {answer.epoch} if answer.epoch else present or epochs
        for entry in entries:
            if self._is_settled(entry):
                continue
            if entry.member.epoch in living:
                entry.seen = self._clock()
                entry.num_failures = 0
            else:
                self._count_failure(entry)

    def _to_ask(self) -> frozenset[Target]:
        if self._bus.connected:
            # The bus reports members from now on, and known members stay known when it is lost
            # again.
            self._saved.clear()
        settled = set[Target]()
        unsettled = set[Target]()
        for entry in self._table.values():
            (settled if self._is_settled(entry) else unsettled).add(
                (entry.member.kind, entry.member.address)
            )
        return frozenset(unsettled | self._saved.keys() | (self._seeds.targets - settled))

    def _at(self, kind: Kind, address: str) -> list[_Entry]:
        """Members at an address: several, where a process has several models or has taken the place
        of a dead one."""
        return [
            each
            for each in self._table.values()
            if each.member.kind is kind and each.member.address == address
        ]

    def _sends_heartbeats(self, entry: _Entry) -> bool:
        """Whether its heartbeats come over the bus now."""
        return self._bus.connected and entry.from_bus

    def _is_settled(self, entry: _Entry) -> bool:
        """Whether the member needs no probe: it sends heartbeats, and they name its only
        address."""
        return self._sends_heartbeats(entry) and not entry.other_address

    def _count_failure(self, entry: _Entry) -> None:
        """Counts an address that did not answer. The process leaves, or goes on by its other
        address."""
        if not entry.num_failures:
            entry.is_seen_there = False
        entry.num_failures += 1
        if entry.num_failures < _PROBE_FAILURES or (
            self._sends_heartbeats(entry) and not entry.is_seen_there
        ):
            return
        self._remove((entry.member.kind, entry.member.replica_id))
        if entry.is_seen_there:
            # The process joins as a new member, since connections to its other address are closed.
            self.on_member(
                dataclasses.replace(entry.member, address=entry.other_address),
                from_bus=entry.from_bus,
            )
