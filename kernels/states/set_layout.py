"""Where a state set lies in pages: what state layers keep of a sequence at a border of blocks.

Knows no tensors: torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

PIECE_COLUMNS = 64
"""Columns of a head's state that lie together, at most."""
ALIGNMENT = 128
"""Bytes: tails begin at multiples of it, which kernels ask for."""
MOST_PADDING = Fraction(4, 100)
"""Share of a page of keys and values by which it may grow so that states fill pages."""
WEIGHED_TOKENS = 1024
"""Tokens of the sequence whose pages, with those of one set, are to take the least memory."""


class SetSizes(NamedTuple):
    """Content of a state set: a tail of each unit of all layers, and pieces of its heads'
    states."""

    num_tails: int
    tail_bytes: int
    num_pieces: int = 0
    piece_bytes: int = 0
    """Bytes of a piece; 0: there are no pieces."""

    @property
    def num_bytes(self) -> int:
        return self.num_tails * self.tail_bytes + self.num_pieces * self.piece_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLayout:
    """The first pages of a set begin with tails, and have pieces behind them as far as there is
    room. Its other pages have pieces alone."""

    page_bytes: int
    num_pages: int
    """Pages of a set."""
    tail_bytes: int
    tails_per_page: int
    num_tail_pages: int
    piece_bytes: int = 0
    """Bytes of a piece; 0: there are no pieces."""
    pieces_behind: int = 0
    """Pieces of a page with tails."""

    @classmethod
    def of(cls, sizes: SetSizes, page_bytes: int) -> SetLayout:
        """The layout of the fewest pages. A page has room for a tail, and for a piece."""
        most = min(page_bytes // sizes.tail_bytes, sizes.num_tails)
        layouts = [_layout(sizes, page_bytes, count) for count in range(most, 0, -1)]
        return min(layouts, key=lambda each: each.num_pages)

    @classmethod
    def beside(cls, sizes: SetSizes, kv_bytes: int, block_size: int) -> SetLayout:
        """The layout in pages that hold `kv_bytes` of keys and values of a block. Pages may be
        somewhat larger, so that a sequence takes less memory."""
        num_blocks = WEIGHED_TOKENS // block_size
        layouts = (cls.of(sizes, size) for size in _page_sizes(sizes, kv_bytes))
        return min(layouts, key=lambda each: each.page_bytes * (num_blocks + each.num_pages))

    @property
    def pieces_at(self) -> int:
        """Byte of a page with tails at which its pieces begin."""
        return self.tails_per_page * self.tail_bytes

    @property
    def num_behind(self) -> int:
        """Pieces in all pages with tails."""
        return self.num_tail_pages * self.pieces_behind

    @property
    def pieces_per_page(self) -> int:
        """Pieces of a page without tails."""
        return self.page_bytes // self.piece_bytes if self.piece_bytes else 0

    @property
    def of_pieces(self) -> tuple[int, ...]:
        """Numbers by which kernels find pieces: `num_behind`, `pieces_behind` or 1, `pieces_at`,
        `num_tail_pages`, `pieces_per_page` and `piece_bytes`."""
        return (
            self.num_behind,
            max(1, self.pieces_behind),
            self.pieces_at,
            self.num_tail_pages,
            self.pieces_per_page,
            self.piece_bytes,
        )

    def tail(self, number: int) -> tuple[int, int]:
        """Page of the set, and byte of it, at which a tail begins, by its number among those of all
        layers."""
        page, place = divmod(number, self.tails_per_page)
        return page, place * self.tail_bytes

    def piece(self, number: int) -> tuple[int, int]:
        """Page of the set, and byte of it, at which a piece begins."""
        if number < self.num_behind:
            page, place = divmod(number, self.pieces_behind)
            return page, self.pieces_at + place * self.piece_bytes
        page, place = divmod(number - self.num_behind, self.pieces_per_page)
        return self.num_tail_pages + page, place * self.piece_bytes


def _layout(sizes: SetSizes, page_bytes: int, tails_per_page: int) -> SetLayout:
    num_tail_pages = -(-sizes.num_tails // tails_per_page)
    pieces_behind = num_others = 0
    if sizes.piece_bytes:
        room = page_bytes - tails_per_page * sizes.tail_bytes
        pieces_behind = room // sizes.piece_bytes
        num_left = max(0, sizes.num_pieces - num_tail_pages * pieces_behind)
        num_others = -(-num_left // (page_bytes // sizes.piece_bytes))
    return SetLayout(
        page_bytes=page_bytes,
        num_pages=num_tail_pages + num_others,
        tail_bytes=sizes.tail_bytes,
        tails_per_page=tails_per_page,
        num_tail_pages=num_tail_pages,
        piece_bytes=sizes.piece_bytes,
        pieces_behind=pieces_behind,
    )


def _page_sizes(sizes: SetSizes, kv_bytes: int) -> Iterator[int]:
    """Bytes of pages: the least, and those that tails and pieces fill."""
    least = max(kv_bytes, sizes.tail_bytes, sizes.piece_bytes)
    yield least
    part = sizes.piece_bytes or sizes.tail_bytes
    for count in range(least // sizes.tail_bytes + 2):
        behind = count * sizes.tail_bytes
        size = behind + -(-max(0, least - behind) // part) * part
        if size <= least * (1 + MOST_PADDING):
            yield size
