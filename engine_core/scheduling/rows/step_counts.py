"""Steps that each request had a part in, and the requests beside it: counted once for all, not row
by row."""

from __future__ import annotations

from ..table.request_state import RequestState


class StepCounts:
    """Counts of planned steps so far, draws left out."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_rows = 0
        """Sum over all steps of the requests that each computed."""

    def note(self, num_requests: int) -> None:
        """Counts a step that computes so many requests."""
        self._num_steps += 1
        self._num_rows += num_requests

    def begin(self, request: RequestState) -> None:
        """Counts a request in steps from now on."""
        request.num_steps -= self._num_steps
        request.num_step_rows -= self._num_rows

    def end(self, request: RequestState) -> None:
        """Stops counting a request that `begin` was called with."""
        request.num_steps += self._num_steps
        request.num_step_rows += self._num_rows
