"""Ports for servers that start later, in a process of their own."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path

HOST = "127.0.0.1"
_PORTS = range(10_000, 20_000)
"""Ports below the range from which the system assigns ports to listeners and connections. Embedded
servers take theirs from the ports above these."""


def free_port() -> int:
    """Returns a free port of the loopback address that no other process is given while this one
    runs."""
    given = _given_ports()
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError):
            fcntl.lockf(given, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.create_server((HOST, port)):
                return port


@functools.cache
def _given_ports() -> int:
    """Descriptor of a file in which a process locks the byte of each port that it was given, until
    it ends."""
    path = Path(tempfile.gettempdir()) / f"headwater-ports-of-tests-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
