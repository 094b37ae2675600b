"""Configuration of a hostile client: its tenant, the addresses that it attacks, and its
counters."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

NO_ANSWER = "no answer"
"""Outcome of a request that was open when the time was up."""
CLOSED = "closed"
"""Outcome of a request whose connection the server closed without an answer, or with one before all
of the body was sent: then the system may drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running deployment, as one tenant reaches it."""

    rest: str
    """Base address of the REST API."""
    grpc: str
    """host:port of the public gRPC API."""
    model: str
    key: str

    @property
    def rest_address(self) -> tuple[str, int]:
        url = urlsplit(self.rest)
        return url.hostname or "127.0.0.1", url.port or 80

    @property
    def grpc_address(self) -> tuple[str, int]:
        host, _, port = self.grpc.rpartition(":")
        return host, int(port)


class Attack(Protocol):
    def prepare(self, model: str) -> None:
        """Builds what takes long to build, before time is measured."""

    async def run(self, target: Target, seen: Counter[str]) -> None:
        """Attacks until it is cancelled, or has sent all it has. Counts outcomes by their status in
        `seen`."""


async def run_for(attack: Attack, target: Target, seconds: float) -> Counter[str]:
    """Outcomes of an attack that is ended after so many seconds."""
    seen: Counter[str] = Counter()
    try:
        async with asyncio.timeout(seconds):
            await attack.run(target, seen)
    except TimeoutError:
        pass
    return seen
