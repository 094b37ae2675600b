"""Ports for servers that start later, in a process of their own."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
_PORTS = range(10_000, 20_000)
"""Ports below the range from which the system assigns ports to listeners and connections. Embedded servers take theirs
from the ports above these."""


def free_port() -> int:
    """Returns a free port of the loopback address that only another call of this function could take."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
