"""Requests that other gateways sent to replicas: each gateway publishes its own in a millisecond.

They expire three seconds after a gateway's last message. Its heartbeat each second corrects them,
since the bus may lose or reorder messages: it lists the requests whose prompts are not computed,
and after a loss of the bus all of them. Knows nothing about choosing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from headwater.proto.events_pb2 import Incarnation, InFlightEntry, InFlightUpdate
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Member
from headwater.services.runtime.tasks import owned_task, set_within

from .fleet import Fleet
from .load import InFlight, Load

TELL_SECONDS = 0.001
"""Seconds within which changes go into one message."""
BEAT_SECONDS = 1.0
EXPIRY_SECONDS = 3.0
TURN_SECONDS = 0.01
"""Time between the turns of two gateways: the later one has received where the requests of the
earlier one went."""
_YOUNG_SECONDS = 0.5
"""A beat may have been overtaken by what was added since."""
_MAX_ENTRIES = 1000
"""Requests in one message: some 100 bytes each, where NATS takes a megabyte."""


@dataclass(slots=True)
class _Sent:
    """A request of this gateway."""

    entry: InFlightEntry
    is_started: bool = False


@dataclass(slots=True)
class _Told:
    load: Load
    request: InFlight
    is_started: bool = False


@dataclass(slots=True)
class _Peer:
    received_at: float
    requests: dict[int, _Told] = field(default_factory=dict)


class Peers:
    """Use within `running`."""

    def __init__(self, bus: Bus, fleet: Fleet, epoch: int, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._fleet = fleet
        self.epoch = epoch
        self._clock = clock
        self._numbers = itertools.count(1)
        self._live: dict[int, _Sent] = {}
        self._update = InFlightUpdate(epoch=epoch)
        self._has_news = asyncio.Event()
        self._peers: dict[int, _Peer] = {}
        self._reconnected = asyncio.Event()
        self._repeats_until = -math.inf
        """Time until which heartbeats list started requests too, after a loss of the bus."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Peers]:
        """Tells and listens inside the `with` block."""
        self._bus.on_connected(self._reconnected.set)
        async with (
            self._bus.subscribe(subjects.EVERY_IN_FLIGHT) as updates,
            owned_task(self._read(updates)),
            owned_task(self._publish_news()),
            owned_task(self._beat()),
        ):
            yield self

    def __len__(self) -> int:
        """Number of other gateways whose last message is recent."""
        return len(self._peers)

    @property
    def turn_seconds(self) -> float:
        """Seconds until this gateway's turn, for work that comes to all gateways at the same
        moment."""
        return TURN_SECONDS * sum(epoch < self.epoch for epoch in self._peers)

    @property
    def num_remote(self) -> int:
        """Number of known requests of other gateways."""
        return sum(len(peer.requests) for peer in self._peers.values())

    def added(self, member: Member, request: InFlight) -> int:
        """Publishes that this gateway sends a request; returns its number, by which its start and
        end are published."""
        number = next(self._numbers)
        entry = InFlightEntry(
            number=number,
            model_key=member.model_key,
            replica=Incarnation(replica_id=member.replica_id, epoch=member.epoch),
            num_tokens=request.num_tokens,
            num_blocks=request.num_blocks,
        )
        self._live[number] = _Sent(entry)
        if self._bus.connected:
            self._update.added.append(entry)
            self._has_news.set()
        return number

    def started(self, number: int) -> None:
        if (sent := self._live.get(number)) is not None:
            sent.is_started = True
        if self._bus.connected:
            self._update.started.append(number)
            self._has_news.set()

    def ended(self, number: int) -> None:
        self._live.pop(number, None)
        if self._bus.connected:
            self._update.ended.append(number)
            self._has_news.set()

    async def _publish_news(self) -> None:
        while True:
            await self._has_news.wait()
            await asyncio.sleep(TELL_SECONDS)
            self._has_news.clear()
            update = self._update
            self._update = InFlightUpdate(epoch=self.epoch)
            await self._publish(update)

    async def _beat(self) -> None:
        while True:
            if await set_within(self._reconnected, BEAT_SECONDS):
                self._reconnected.clear()
                # For several beats: other gateways may be back a moment later.
                self._repeats_until = self._clock() + EXPIRY_SECONDS
            if self._bus.connected:
                await self._publish_beat()
            self._expire()

    async def _publish_beat(self) -> None:
        is_whole = self._clock() < self._repeats_until
        await self._repeat(list(self._live) if is_whole else self._unstarted())
        await self._publish(
            InFlightUpdate(
                epoch=self.epoch,
                is_beat=True,
                live=self._live,
                unstarted=self._unstarted(),
                names_unstarted=True,
            )
        )

    def _unstarted(self) -> list[int]:
        return [number for number, sent in self._live.items() if not sent.is_started]

    async def _repeat(self, numbers: Sequence[int]) -> None:
        """Publishes requests once more. One that a gateway knows counts there once all the same."""
        for first in range(0, len(numbers), _MAX_ENTRIES):
            some = numbers[first : first + _MAX_ENTRIES]
            # Requests may have ended while earlier ones were published.
            sent = [self._live[number] for number in some if number in self._live]
            started = [each.entry.number for each in sent if each.is_started]
            await self._publish(
                InFlightUpdate(
                    epoch=self.epoch, added=[each.entry for each in sent], started=started
                )
            )

    async def _publish(self, update: InFlightUpdate) -> None:
        await self._bus.publish(subjects.in_flight(self.epoch), update.SerializeToString())

    async def _read(self, updates: Subscription) -> None:
        async for _, update in updates.decoded(InFlightUpdate.FromString, "update"):
            if update.epoch != self.epoch:
                self._take(update)

    def _take(self, update: InFlightUpdate) -> None:
        now = self._clock()
        peer = self._peers.setdefault(update.epoch, _Peer(now))
        peer.received_at = now
        for entry in update.added:
            self._add(peer, entry, now)
        for number in update.started:
            self._start(peer, number, now)
        for number in update.ended:
            self._end(peer, number, now)
        if update.is_beat:
            self._take_beat(peer, update, now)

    def _take_beat(self, peer: _Peer, update: InFlightUpdate, now: float) -> None:
        live = set(update.live)
        unstarted = set(update.unstarted)
        for number, remote in list(peer.requests.items()):
            if number not in live:
                if now - remote.request.sent_at > _YOUNG_SECONDS:
                    self._end(peer, number, now)
            elif update.names_unstarted and number not in unstarted:
                self._start(peer, number, now)

    def _add(self, peer: _Peer, entry: InFlightEntry, now: float) -> None:
        replica = self._fleet.of(entry.model_key).get(entry.replica.replica_id)
        is_known = replica is not None and replica.member.epoch == entry.replica.epoch
        if replica is not None and is_known and entry.number not in peer.requests:
            request = replica.load.add(entry.num_tokens, entry.num_blocks, now)
            peer.requests[entry.number] = _Told(replica.load, request)

    def _start(self, peer: _Peer, number: int, now: float) -> None:
        if (remote := peer.requests.get(number)) is not None and not remote.is_started:
            remote.is_started = True
            remote.load.started(remote.request, now)

    def _end(self, peer: _Peer, number: int, now: float) -> None:
        if (remote := peer.requests.pop(number, None)) is not None:
            remote.load.ended(remote.request, now)

    def _expire(self) -> None:
        now = self._clock()
        for epoch, peer in list(self._peers.items()):
            if now - peer.received_at > EXPIRY_SECONDS:
                del self._peers[epoch]
                for number in list(peer.requests):
                    self._end(peer, number, now)
