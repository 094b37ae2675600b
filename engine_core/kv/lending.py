"""The protocol of a lender: a block source of this engine whose blocks other engines may copy, as
they copy those of the KV cache.

Knows hashes and bytes; knows nothing about leases or links.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from .block_source import Owner

Read = Callable[[memoryview], bool]
"""Copies the bytes of one held block. Called outside of the step loop. Returns False where they
cannot be read; the destination then has arbitrary bytes."""


class Lender(Protocol):
    """Both methods are called by the step loop."""

    def hold(self, hashes: Sequence[bytes]) -> list[Read]:
        """Holds the leading blocks of `hashes` that this tier has, one read for each. They do not
        change until `let_go`."""

    def let_go(self, hashes: Sequence[bytes]) -> None:
        """Ends one hold of each of these blocks. No read of them may be running or follow."""


class Steps(Protocol):
    """Steps in flight that compute blocks. A block is in the cache from the moment that its step is
    planned."""

    @property
    def youngest(self) -> int:
        """Number of the youngest step; 0 if none is in flight."""

    def last_to_compute(self, hashes: Collection[bytes]) -> int:
        """Number of the youngest step in flight that computes one of these blocks; 0: none does."""


class Release(Protocol):
    def __call__(
        self, blocks: Sequence[int], hashes: Sequence[bytes], owner: Owner, parent: bytes = b""
    ) -> None:
        """See `BlockLoads.release`."""
