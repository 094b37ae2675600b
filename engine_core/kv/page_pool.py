"""The pool of pages of all page groups, and how many of each kind a sequence takes. Knows sizes and
windows; knows no requests."""

from __future__ import annotations

from ..config import LRU, EngineConfig
from .block_pool import BlockPool
from .page_keys import PageKeys
from .prefix_cache import HeldPages, Hits
from .value.recompute import RecomputeCosts


class PagePool(BlockPool):
    """A `BlockPool` of pages."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.num_blocks, costs_of(config))
        self._config = config
        self._kinds = config.page_kinds
        num_groups = config.num_page_groups
        set_groups = range(num_groups, num_groups + config.state_pages)
        self.keys = PageKeys(self._kinds, config.block_size, set_groups)
        """Keys by which pages go to block sources."""
        self.num_groups = config.num_page_groups
        """Pages of a block that every layer sees."""

    def num_held(self, num_tokens: int) -> int:
        """Most pages that a sequence with `num_tokens` tokens holds."""
        return self._config.num_held(num_tokens)

    def num_new(self, hits: Hits, num_tokens: int) -> tuple[int, ...]:
        """Number of new blocks of each kind that a sequence with `num_tokens` tokens needs after
        its hits, as many as it holds at once."""
        num_lacking = -(-num_tokens // self._config.block_size) - hits.num_blocks
        return tuple(
            min(num_lacking, self._config.num_held_of(kind, num_tokens) - held.end + held.first)
            for kind, held in zip(self._kinds, hits.held, strict=True)
        )

    def num_pages(self, num_blocks: tuple[int, ...]) -> int:
        """Pages of so many blocks of each kind."""
        return sum(
            len(kind.groups) * count for kind, count in zip(self._kinds, num_blocks, strict=True)
        )

    def longer(self, hits: Hits, num_new: tuple[int, ...]) -> list[HeldPages]:
        """The hits followed by newly allocated pages, `num_new` blocks of each kind."""
        return [
            HeldPages(
                held.first,
                held.end + count,
                held.pages + self.allocate(count * len(kind.groups)),
            )
            for kind, held, count in zip(self._kinds, hits.held, num_new, strict=True)
        ]

    def extended(self, ends: list[int], end: int) -> list[HeldPages]:
        """Free pages from block ends[i] of kind i up to block `end`, or as far as there are free
        ones for all kinds."""
        while sum(counts := self._lacking(ends, end)) > self.num_free:
            end -= 1
        return [
            HeldPages(first, max(first, end), self.allocate(count))
            for first, count in zip(ends, counts, strict=True)
        ]

    def num_lacking(self, ends: list[int], end: int) -> int:
        """Number of pages up to block `end` that a row lacks; it has pages of kind i up to
        ends[i]."""
        return sum(self._lacking(ends, end))

    def _lacking(self, ends: list[int], end: int) -> list[int]:
        return [
            len(kind.groups) * max(0, end - first)
            for kind, first in zip(self._kinds, ends, strict=True)
        ]


def costs_of(config: EngineConfig) -> RecomputeCosts | None:
    """Recompute costs of pages by their index in a chain, whose blocks have one page for each page
    group; None: costs do not count."""
    if config.eviction == LRU or not config.enable_prefix_caching:
        return None
    if not config.attention_pivot:
        return RecomputeCosts()
    num_blocks = config.attention_pivot / config.block_size
    return RecomputeCosts(num_blocks * config.num_page_groups)
