"""How many more requests may run: a seat is free as soon as its request leaves, if a row of the
table is."""

from __future__ import annotations

from collections.abc import Sized

from .request_table import RequestTable


class Seats:
    def __init__(self, running: Sized, table: RequestTable, num_seats: int) -> None:
        """`running`: the requests that run, now and later."""
        self._running = running
        self._table = table
        self._num_seats = num_seats

    @property
    def num_free(self) -> int:
        """Seats that a request can take now."""
        return min(self.num_left, len(self._table.free_rows))

    @property
    def num_left(self) -> int:
        """Seats without a request, those included whose row has yet to return."""
        return self._num_seats - len(self._running)
