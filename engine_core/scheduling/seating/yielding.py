"""Chooses the running requests that make room for waiting ones: stalled ones, and those of tenants
ahead of their fair share.

Only names them, one at a time; the scheduler preempts each before it asks for the next. Seats and
blocks of requests that are leaving count as free.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..blocks.blocks import Blocks
from ..rows.rows import Rows
from ..table.request_state import RequestState
from .preemption import Preemption
from .waiting_queue import WaitingQueue


class Yielding:
    def __init__(
        self,
        waiting: WaitingQueue,
        preemption: Preemption,
        rows: Rows,
        blocks: Blocks,
    ) -> None:
        self.too_large: RequestState | None = None
        """The waiting request that found too few blocks; it is not looked at again until some are
        released."""
        self._num_blocks_wanted = 0
        self._waiting = waiting
        self._preemption = preemption
        self._rows = rows
        self._blocks = blocks
        self._num_moves = 0
        """Seats that were taken or left."""
        self._unyielding: tuple[int, int, int] | None = None
        """(request key, waiting tenants, move count) of the last attempt that found no victim."""

    def note_too_large(self, request: RequestState, num_blocks_wanted: int) -> None:
        self.too_large = request
        self._num_blocks_wanted = num_blocks_wanted
        self._unyielding = None

    def note_released(self) -> None:
        """Notes that blocks were released."""
        self.too_large = None

    def note_move(self) -> None:
        """Notes that a seat was taken or left."""
        self._num_moves += 1

    def stalled(self) -> Iterator[RequestState]:
        """Requests whose readers take no tokens, while others lack room. No step, planned or in
        flight, computes them."""
        while (stalled := self._preemption.first_stalled()) is not None and self._lacks_room():
            yield stalled

    def ahead(self) -> Iterator[RequestState]:
        """Requests of tenants that hold more than waiting ones: for seats, than the first request
        of each waiting tenant; for blocks, than the request whose turn is next."""
        following = self._waiting.peek()
        if following is None or self._unyielding == self._attempt(following):
            return
        held = self._preemption.held_blocks()
        if following is self.too_large:
            while (
                self._lacks_blocks()
                and (victim := self._preemption.take_for(following, held)) is not None
            ):
                yield victim
        elif self.too_large is None or not self._rows.num_free_seats:
            # Requests yield also while seats are free, so that the waiting requests after those
            # that take the free seats are seated in the same step.
            for behind in self._waiting.heads()[self._rows.num_left_seats :]:
                if (victim := self._preemption.take_for(behind, held)) is None:
                    break
                yield victim
        self._unyielding = self._attempt(following)

    def _attempt(self, following: RequestState) -> tuple[int, int, int]:
        return following.key, self._waiting.num_tenants, self._num_moves

    def _lacks_room(self) -> bool:
        """Whether the request whose turn is next lacks blocks, or some ready request a seat."""
        following = self._waiting.peek()
        if following is None:
            return False
        if following is self.too_large:
            return self._lacks_blocks()
        return self._rows.num_left_seats < self._waiting.num_ready

    def lacks_room_for(self, following: RequestState) -> bool:
        """Whether the request whose turn is next lacks blocks or a seat."""
        if following is self.too_large:
            return self._lacks_blocks()
        return self._rows.num_left_seats < 1

    def _lacks_blocks(self) -> bool:
        num_returning = self._blocks.num_returning(self._rows.leaving)
        return self._num_blocks_wanted > self._blocks.num_free + num_returning
