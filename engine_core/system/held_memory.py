"""Memory of a device that outlives its process: descriptors of it lie with a holder, another
process, which hands them to the next life of an engine. Knows no device and no tensors.

Each request is one message on a socket that the engine inherits. It carries a socket for the reply
and a pidfd of the engine: memory goes to nobody while the process that last had it may write to it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

MAX_BYTES = 4096
"""Bytes of a message."""
MAX_FILES = 4
REPLY_SECONDS = 30.0
"""Seconds to wait for a holder's reply, which itself waits for the death of an earlier process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory by its file descriptors, which the owner of this record closes."""

    memory: int
    """The device's memory, as its driver exports it."""
    layout: int
    """Descriptor of a file with the table of its contents."""
    num_bytes: int
    checksum: int
    """Checksum of the memory's contents."""

    @property
    def files(self) -> tuple[int, int]:
        return self.memory, self.layout

    @classmethod
    def of(cls, facts: dict[str, Any], files: Sequence[int]) -> Self:
        memory, layout = files
        num_bytes, checksum = facts["num_bytes"], facts["checksum"]
        return cls(memory=memory, layout=layout, num_bytes=num_bytes, checksum=checksum)

    @property
    def facts(self) -> dict[str, Any]:
        return {"num_bytes": self.num_bytes, "checksum": self.checksum}

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def held_bytes(requests: int) -> int:
    """Bytes that a holder has, by the descriptor of its requests; -1: there is no holder."""
    if requests < 0:
        return 0
    return MemoryHolder(requests).num_bytes


class MemoryHolder:
    """The engine's end. A holder that is gone holds nothing."""

    def __init__(self, requests: int) -> None:
        """`requests`: descriptor of the holder's socket, which stays open."""
        self._requests = requests

    def take(self, key: str) -> HeldMemory | None:
        """Takes over the memory that is held under a key, once the process that had it is dead.
        Memory under another key is released. None: there is none, or that process does not end."""
        reply, files = self._ask({"verb": "take", "key": key})
        return HeldMemory.of(reply, files) if files else None

    def keep(self, key: str, held: HeldMemory) -> bool:
        """Hands memory to the holder, which releases what it held before. Returns whether it
        succeeded."""
        reply, _ = self._ask({"verb": "keep", "key": key, **held.facts}, *held.files)
        return bool(reply)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        reply, _ = self._ask({"verb": "count"})
        return int(reply.get("num_bytes", 0))

    def drop(self) -> None:
        """Releases all held memory."""
        self._ask({"verb": "drop"})

    def _ask(self, request: dict[str, Any], *files: int) -> tuple[dict[str, Any], list[int]]:
        """The holder's reply, with descriptors; nothing where it is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack:
            stack.enter_context(ours)
            try:
                with theirs:
                    own = os.pidfd_open(os.getpid())
                    stack.callback(os.close, own)
                    message = [json.dumps(request).encode()]
                    with socket.socket(fileno=os.dup(self._requests)) as requests:
                        socket.send_fds(requests, message, [theirs.fileno(), own, *files])
                ours.settimeout(REPLY_SECONDS)
                reply, found, _, _ = socket.recv_fds(ours, MAX_BYTES, MAX_FILES)
            except OSError:
                return {}, []
        return (json.loads(reply) if reply else {}), found
