"""Several gateways, one account: each tells the others what it sends where, within a millisecond.

What a gateway told is forgotten three seconds after its last word, and put right by its beat each second, since the
bus may lose or turn round what it carries. Knows nothing about choosing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headwater.proto.events_pb2 import Incarnation, InFlightEntry, InFlightUpdate
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Member
from headwater.services.runtime.tasks import owned_task

from .fleet import Fleet
from .load import InFlight, Load

TELL_SECONDS = 0.001
"""Seconds within which changes go into one message."""
BEAT_SECONDS = 1.0
EXPIRY_SECONDS = 3.0
_YOUNG_SECONDS = 0.5
"""A beat may have been overtaken by what was added since."""


@dataclass(slots=True)
class _Told:
    load: Load
    request: InFlight
    is_started: bool = False


@dataclass(slots=True)
class _Peer:
    heard_at: float
    requests: dict[int, _Told] = field(default_factory=dict)


class Peers:
    """Use within `running`."""

    def __init__(self, bus: Bus, fleet: Fleet, epoch: int, clock: Callable[[], float]) -> None:
        self._bus, self._fleet, self.epoch, self._clock = bus, fleet, epoch, clock
        self._numbers = itertools.count(1)
        self._live: dict[int, None] = {}
        self._update = InFlightUpdate(epoch=epoch)
        self._is_told = asyncio.Event()
        self._peers: dict[int, _Peer] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Peers]:
        """Tells and listens for the length of a scope."""
        async with (
            self._bus.subscribe(subjects.EVERY_IN_FLIGHT) as updates,
            owned_task(self._read(updates)),
            owned_task(self._tell()),
            owned_task(self._beat()),
        ):
            yield self

    def __len__(self) -> int:
        """Other gateways that were heard lately."""
        return len(self._peers)

    @property
    def num_told(self) -> int:
        """Requests of others in the account."""
        return sum(len(peer.requests) for peer in self._peers.values())

    def added(self, member: Member, request: InFlight) -> int:
        """A request leaves from here; its number for what follows."""
        number = next(self._numbers)
        self._live[number] = None
        if not self._bus.connected:
            return number
        replica = Incarnation(replica_id=member.replica_id, epoch=member.epoch)
        self._update.added.append(
            InFlightEntry(
                number=number,
                model_key=member.model_key,
                replica=replica,
                num_tokens=request.num_tokens,
                num_blocks=request.num_blocks,
            )
        )
        self._is_told.set()
        return number

    def started(self, number: int) -> None:
        if self._bus.connected:
            self._update.started.append(number)
            self._is_told.set()

    def ended(self, number: int) -> None:
        self._live.pop(number, None)
        if self._bus.connected:
            self._update.ended.append(number)
            self._is_told.set()

    async def _tell(self) -> None:
        while True:
            await self._is_told.wait()
            await asyncio.sleep(TELL_SECONDS)
            self._is_told.clear()
            update, self._update = self._update, InFlightUpdate(epoch=self.epoch)
            await self._publish(update)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._publish(InFlightUpdate(epoch=self.epoch, is_beat=True, live=self._live))
            self._expire()

    async def _publish(self, update: InFlightUpdate) -> None:
        await self._bus.publish(subjects.in_flight(self.epoch), update.SerializeToString())

    async def _read(self, updates: Subscription) -> None:
        async for _, update in updates.decoded(InFlightUpdate.FromString, "update"):
            if update.epoch != self.epoch:
                self._take(update)

    def _take(self, update: InFlightUpdate) -> None:
        now = self._clock()
        peer = self._peers.setdefault(update.epoch, _Peer(now))
        peer.heard_at = now
        for entry in update.added:
            self._add(peer, entry, now)
        for number in update.started:
            if (told := peer.requests.get(number)) is not None and not told.is_started:
                told.is_started = True
                told.load.started(told.request, now)
        for number in update.ended:
            self._end(peer, number, now)
        if update.is_beat:
            live = set(update.live)
            for number, told in list(peer.requests.items()):
                if number not in live and now - told.request.sent_at > _YOUNG_SECONDS:
                    self._end(peer, number, now)

    def _add(self, peer: _Peer, entry: InFlightEntry, now: float) -> None:
        replica = self._fleet.of(entry.model_key).get(entry.replica.replica_id)
        is_known = replica is not None and replica.member.epoch == entry.replica.epoch
        if replica is not None and is_known and entry.number not in peer.requests:
            request = replica.load.add(entry.num_tokens, entry.num_blocks, now)
            peer.requests[entry.number] = _Told(replica.load, request)

    def _end(self, peer: _Peer, number: int, now: float) -> None:
        if (told := peer.requests.pop(number, None)) is not None:
            told.load.ended(told.request, now)

    def _expire(self) -> None:
        now = self._clock()
        for epoch, peer in list(self._peers.items()):
            if now - peer.heard_at > EXPIRY_SECONDS:
                del self._peers[epoch]
                for number in list(peer.requests):
                    self._end(peer, number, now)
