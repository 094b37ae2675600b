"""Requests that compute nothing more, while a launched step still lists their rows and blocks.

Knows which of them come back; knows nothing about why they leave or what becomes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..table.request_state import RequestState


class PendingRelease:
    """Queue of requests that have left but whose row is in a step in flight, oldest first."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, RequestState]] = deque()
        """Requests to release, with the last step that may list them."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestState]:
        return (request for _, request in self._queue)

    def push(self, request: RequestState, last_step: int) -> None:
        self._queue.append((last_step, request))

    def pop_until(self, step: int) -> Iterator[RequestState]:
        """Removes and returns the entries that no step after `step` uses."""
        while self._queue and self._queue[0][0] <= step:
            yield self._queue.popleft()[1]

    @property
    def num_unfinished(self) -> int:
        return sum(not request.has_finished for request in self)

    @property
    def num_preempted(self) -> int:
        """Number of preempted requests that will return to the head of the waiting queue."""
        return sum(not (request.has_finished or request.has_yielded) for request in self)
