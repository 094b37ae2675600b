"""Cuts off clients that take nothing of what was written to them, also those whose connection is
closed: it would stay, with all that is unsent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SECONDS_PER_CHECK = 1.0


class UntakenBytes:
    def __init__(self, patience: float) -> None:
        """`patience` is the number of seconds in which a client has to take something."""
        self._patience = patience
        self._unsent: dict[Any, tuple[int, int]] = {}
        """Unsent bytes of connections, and how many checks in turn found the same number."""

    def check(self, transports: Iterable[Any]) -> None:
        """Is to be called every `SECONDS_PER_CHECK`, with the transports of all connections."""
        before = self._unsent
        self._unsent = {}
        for transport in transports:
            if num_bytes := transport.get_write_buffer_size():
                num_before, num_checks = before.get(transport, (0, 0))
                self._unsent[transport] = (
                    num_bytes,
                    num_checks + 1 if num_bytes == num_before else 0,
                )
        for transport, (_, num_checks) in self._unsent.items():
            # Counts checks, not time: while this process is delayed no client can read anything.
            if num_checks * SECONDS_PER_CHECK > self._patience:
                transport.abort()
