"""The store of an engine whose stages are on several hosts. Its ranks write their addresses there
when they start; no rank reads it later.

NOTE: the store is torch's and asks for no secret. It listens at one address, and only until all
ranks are connected.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from .rendezvous import Rendezvous

NO_LIMIT = timedelta(days=365)


class RendezvousStore:
    """Store of the rendezvous. It listens when it is created, so that its port is known before
    ranks start."""

    def __init__(self, listening: socket.socket) -> None:
        """Listens at another port of the address where `listening` does."""
        host = str(listening.getsockname()[0])
        self._socket = socket.create_server((host, 0), family=listening.family)
        self.rendezvous = Rendezvous(host, int(self._socket.getsockname()[1]), host)
        """Address as ranks of this host see it."""
        self._store: TCPStore | None = None

    def serve(self) -> None:
        """Answers ranks, in a thread of its own: this process must not be copied any more."""
        host, port, _ = self.rendezvous
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
            timeout=NO_LIMIT,
        )

    def close(self) -> None:
        """Stops listening. A second time does nothing."""
        self._store = None
        self._socket.close()
