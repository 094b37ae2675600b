"""The ranges of one batch in the queue, a bounded number at a time, and the lines that have a
result."""

from __future__ import annotations

from collections.abc import Iterator

from ..retry import retry
from .ranges import Range, Ranges, first_of

MAX_RANGES = 64
"""Number of ranges of one batch in the queue or in work: enough for a dozen gateways, few enough
that batches take turns."""


class HandOut:
    def __init__(self, ranges: Ranges, todo: Iterator[tuple[Range, set[int]]]) -> None:
        self._ranges = ranges
        self._todo = todo
        self._open: dict[int, tuple[Range, set[int]]] = {}
        """Ranges by first line, each with the numbers of its lines that have no result."""
        self._done: set[int] = set()
        """Numbers of the lines that have a result."""
        self.num_good = self.num_bytes = 0

    @property
    def num_done(self) -> int:
        return len(self._done)

    def note(self, number: int, is_good: bool, num_bytes: int) -> None:
        """Notes that a line has a result. A line may be reported again."""
        if number not in self._done:
            self.num_good += is_good
            self.num_bytes += num_bytes
        self._done.add(number)
        _, left = self._open.get(first_of(number), (None, set()))
        left.discard(number)
        if not left:
            self._open.pop(first_of(number), None)

    async def top_up(self) -> None:
        """Puts ranges into the queue while there is room for this batch's ranges."""
        while len(self._open) < MAX_RANGES and (following := next(self._todo, None)) is not None:
            each, numbers = following
            if left := numbers - self._done:
                self._open[each.first] = each, left
                await self._put(each)

    async def repeat(self) -> None:
        """Puts the ranges that are in the queue or in work into the queue again, in case one was
        lost."""
        for each, _ in list(self._open.values()):
            await self._put(each)

    async def _put(self, each: Range) -> None:
        await retry(lambda: self._ranges.put(each))
