"""Columns of a block table: which of them hold a row's KV pages, and which the pages of its states.

Knows no pages.
"""

from __future__ import annotations

from typing import NamedTuple


class TableColumns(NamedTuple):
    """Columns of a row, in this order: max_blocks of each page group; where the model has state
    layers, max_blocks + 1 by block of the sequence, each the place of the block's state set; then
    `state_pages` pages of each place."""

    num_groups: int
    """Page groups of keys and values."""
    max_blocks: int
    state_pages: int = 0
    """Pages of a state set; 0: the model has no state layers."""
    num_sets: int = 0
    """Places for state sets."""

    @property
    def first_place(self) -> int:
        """Column of the place of block 0's state set."""
        return self.num_groups * self.max_blocks

    @property
    def first_page(self) -> int:
        """Column of the first page of the state set in place 0."""
        return self.first_place + self.max_blocks + 1

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        if not self.state_pages:
            return self.first_place
        return self.first_page + self.num_sets * self.state_pages
