"""Loads blocks from another engine while that may still compute them. Does not decide when to ask,
and for how many."""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Holder
from .block_source import Owner, Ticket
from .peer_blocks import PeerBlocks


class EarlyPull:
    """A `Loader` of one load. It is not a block source: a request that waits for it still asks the
    block sources for missing blocks."""

    tier = PeerBlocks.tier

    def __init__(self, peers: PeerBlocks, owner: Owner, holder: Holder, parent: bytes) -> None:
        """`parent`: the hash before the first block, or empty."""
        self._peers = peers
        self._owner = owner
        self._holder = holder
        self._parent = parent

    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Ticket:
        return self._peers.load_early(hashes, blocks, self._owner, self._holder, self._parent)

    def cost(self, num_blocks: int) -> float:
        return self._peers.cost(num_blocks)

    def cancel(self, ticket: Ticket) -> None:
        self._peers.cancel(ticket)
