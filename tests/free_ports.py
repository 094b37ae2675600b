"""Ports for servers that start later, in a process of their own."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
_PORTS = range(10_000, 20_000)
"""Ports that the system gives to nobody: neither to who asks for any nor to an end of a connection. Embedded servers
take theirs from those above."""


def free_port() -> int:
    """A port of loopback that is free, and that only another caller of this could take."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
