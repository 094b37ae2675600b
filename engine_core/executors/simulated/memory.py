"""Memory of a simulated executor that sleep releases: its KV cache is overwritten, so that a read
of a lost entry is detected."""

from __future__ import annotations

from .hashes import UInt64Array

GONE = 0x5EE0_0000_0000_0001


class SimulatedMemory:
    """See `ReleasableMemory`."""

    keeps_cache = False

    def __init__(self, kv: UInt64Array) -> None:
        self._kv = kv
        self.is_here = True

    @property
    def num_bytes(self) -> int:
        return self._kv.nbytes

    def release(self) -> int:
        assert self.is_here
        self._kv.fill(GONE)
        self.is_here = False
        return self._kv.nbytes

    def restore(self) -> None:
        assert not self.is_here
        self.is_here = True
