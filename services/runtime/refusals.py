"""Counts refusals for lack of a proof, and logs the first of each kind, so that a process without
the key cannot fill the log."""

from __future__ import annotations

import prometheus_client
import structlog

REFUSED = prometheus_client.Counter(
    "headwater_refused",
    "Calls, bus messages and records refused because no member signed them",
    ["what", "why"],
)


class Refusals:
    """Refusals of one kind of thing. `what` is the label of the metric."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged: set[str] = set()

    def add(self, why: str, **about: str) -> None:
        """Counts a refusal. `why` is a word of a fixed set."""
        REFUSED.labels(self._what, why).inc()
        if why not in self._logged:
            self._logged.add(why)
            structlog.get_logger().warning(
                f"{self._what} refused, more are only counted", why=why, **about
            )
