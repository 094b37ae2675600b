"""The replica of a prefix that no index knows, by rendezvous hashing: the same on every gateway
without messages."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

_HOME_BLOCKS = 2
"""Number of leading blocks whose hash names the prefix: enough to distinguish conversations, and
few enough that all turns of a conversation hash alike."""


def prefix_of(hashes: Sequence[bytes]) -> bytes:
    """Names the prefix that a prompt shares with its relatives; empty for a prompt without a full
    block."""
    return hashes[min(_HOME_BLOCKS, len(hashes)) - 1] if hashes else b""


def by_distance(prefix: bytes, replica_ids: Sequence[str]) -> list[str]:
    """The replicas, the prefix's home first; when one leaves, only its own prefixes move."""
    return sorted(
        replica_ids,
        key=lambda replica_id: blake2b(prefix + replica_id.encode(), digest_size=8).digest(),
    )
