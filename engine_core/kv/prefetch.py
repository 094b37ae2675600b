"""A prefetch as the engine sees it: blocks of a prompt to pull from the engine that computes it,
before the request comes. Knows nothing about sessions or how blocks travel."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPrefetch:
    """Crosses from server to core, so it holds plain data only."""

    number: int
    """Names the prefetch between server and core; never reused within a core's life."""
    hashes: list[bytes]
    """Hashes of the prompt's full blocks, from the first one on."""
    namespace: bytes
    """Root of the hash chain."""
    tenant: str
    holder: Holder
    """The engine that has the blocks, or computes them. This is a hint, as a request's is."""
    chunk_blocks: int
    """Blocks that a step of the holder fills at most."""
    seconds: float
    """Seconds after which the prefetch ends without a request."""
