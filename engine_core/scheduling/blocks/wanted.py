"""KV blocks that a request without a row would take."""

from __future__ import annotations

from typing import NamedTuple

from ...kv.prefix_cache import Hits


class Wanted(NamedTuple):
    """Blocks of all known tokens of a request without a row."""

    hits: Hits
    """Cached blocks that it continues; no reference is held on them yet."""
    max_hits: int
    """Largest number of cached blocks that it may use."""
    num_tokens: int
    """Known tokens."""
    num_new: tuple[int, ...]
    """Blocks of each kind that have to be computed, or copied, as many as it holds at once."""
