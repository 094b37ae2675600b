"""Rendezvous of the ranks of pipeline stages on several hosts."""

from __future__ import annotations

from typing import NamedTuple


class Rendezvous(NamedTuple):
    """Address of the rendezvous as a rank of one host sees it."""

    store_host: str
    """Address of the engine's store, see `RendezvousStore`."""
    store_port: int
    own_host: str
    """Address of the rank's host, at which it listens for tensors."""
