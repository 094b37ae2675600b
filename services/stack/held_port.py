"""A port that a cluster keeps for its gateways, from before the first begins until the last has
ended.

Knows nothing about who listens there.
"""

from __future__ import annotations

import socket


class HeldPort:
    """Binds `port`, or a free one for 0, so that no other process is given it; listeners share it.
    Raises `OSError` when another process has it."""

    def __init__(self, host: str, port: int) -> None:
        if port:
            check_free(host, port)
        # Bound and never listening: no connection ends here.
        self._socket = _unbound(host)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((host, port))
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def check_free(host: str, port: int) -> None:
    """Raises `OSError` when somebody listens there."""
    with _unbound(host) as probe:
        probe.bind((host, port))


def _unbound(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
