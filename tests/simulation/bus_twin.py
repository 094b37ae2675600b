"""A bus in memory, for simulations: messages arrive after a while or, as configured, late, twice or
never.

Passes the contract tests of the real one. Runs on any event loop; knows nothing about the contents
of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headwater.services.runtime.bus import Bus, Message, Subscription


@dataclass(slots=True)
class Air:
    """State that all buses of a simulation share; its faults may be changed at any time."""

    seconds: float = 0.001
    """Seconds that a message takes."""
    jitter: float = 0.0
    """Largest number of additional seconds, drawn for each message: some messages overtake
    others."""
    drop: float = 0.0
    """Share of messages that are lost."""
    double: float = 0.0
    """Share of messages that arrive twice."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    buses: list[BusTwin] = field(default_factory=list)

    def deliver(self, message: Message) -> None:
        for _ in range(2 if self.rng.random() < self.double else 1):
            if self.rng.random() >= self.drop:
                delay = self.seconds + self.jitter * self.rng.random()
                asyncio.get_running_loop().call_later(delay, self._deliver, message)

    def _deliver(self, message: Message) -> None:
        for bus in self.buses:
            bus.take(message)


class BusTwin(Bus):
    """The bus of one process; `lose` and `find` are the loss and return of its connection."""

    def __init__(self, air: Air) -> None:
        super().__init__(None)
        self._air = air
        self.connected = True

    @classmethod
    @contextlib.asynccontextmanager
    async def on(cls, air: Air) -> AsyncIterator[BusTwin]:
        bus = cls(air)
        air.buses.append(bus)
        try:
            yield bus
        finally:
            air.buses.remove(bus)

    def lose(self) -> None:
        self.connected = False

    def find(self) -> None:
        if not self.connected:
            self.connected = True
            for listener in list(self._listeners):
                listener()

    def take(self, message: Message) -> None:
        if self.connected:
            for subscription in self._subscriptions:
                if _matches(subscription.subject, message.subject):
                    subscription.put(message)

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            self._air.deliver(Message(subject, payload))

    @contextlib.asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator[Subscription]:
        subscription = Subscription(subject, self._seal_reader())
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)


def _matches(pattern: str, subject: str) -> bool:
    return subject.startswith(pattern[:-1]) if pattern.endswith(">") else subject == pattern
