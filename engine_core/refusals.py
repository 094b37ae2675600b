"""Chooses the queued requests to refuse, so that most of the others meet their deadlines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

RequestT = TypeVar("RequestT")


class Due(NamedTuple):
    """A request of the queue."""

    by: float
    """Time by which the request has to be computed."""
    seconds: float
    """Time to compute it."""
    may_be_refused: bool


def refusals(
    queue: Iterable[tuple[Due, RequestT]], begin: float
) -> Iterator[tuple[RequestT, float]]:
    """Requests to refuse, each with the seconds by which one would otherwise be late, of a queue in
    order of due times that is computed from `begin` on, one request after another.

    Whenever a request would be late, the longest of those up to it is refused: no other choice
    leaves more in time. See Moore, An n Job, One Machine Sequencing Algorithm for Minimizing the
    Number of Late Jobs (1968).
    """
    end = begin
    longest: list[tuple[float, int, RequestT]] = []
    for number, (due, request) in enumerate(queue):
        end += due.seconds
        if due.may_be_refused:
            heappush(longest, (-due.seconds, -number, request))
        while end > due.by and longest:
            seconds, _, refused = heappop(longest)
            yield refused, end - due.by
            end += seconds
