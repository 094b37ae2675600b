"""How many replicas a model should have, by what is observed of it. Starts and stops none."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass

from ..runtime.settings import SettingError, require

IDLE_SECONDS = 300.0
TARGET_REQUESTS = 32
UP_SECONDS = 2.0
"""Seconds that a load must last before it gets another replica."""
RELEASE = 0.5
"""Share of their target to which the load may fill the other replicas when one is stopped: with
more, one would soon be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """Bounds of the number of replicas, and when it changes. Equal bounds are a fixed number."""

    min_replicas: int
    max_replicas: int
    idle_seconds: float = IDLE_SECONDS
    """Seconds after which a replica that is not needed is stopped."""
    target_requests: int = TARGET_REQUESTS
    """Requests at once on a replica, before another one is started."""

    def __post_init__(self) -> None:
        require(self.min_replicas >= 0, "min_replicas", self.min_replicas, "at least 0")
        if self.max_replicas < max(1, self.min_replicas):
            raise SettingError(
                "max_replicas", self.max_replicas, f"at least {max(1, self.min_replicas)}"
            )
        if self.idle_seconds <= 0:
            raise SettingError("idle_seconds", self.idle_seconds, "more than 0")
        require(self.target_requests >= 1, "target_requests", self.target_requests, "at least 1")

    def with_bounds(self, least: int | None, most: int | None) -> ScaleRules:
        """Rules with other bounds; one that is not given moves only where it would cross the other.
        Raises `SettingError`."""
        low = self.min_replicas if least is None else least
        high = self.max_replicas if most is None else most
        if least is None:
            low = min(low, high)
        if most is None:
            high = max(low, high)
        return dataclasses.replace(self, min_replicas=low, max_replicas=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A model's replicas and requests at one moment."""

    num_replicas: int
    """Number of replicas that were started, ready or not."""
    num_without_replica: int = 0
    """Number of requests at gateways that wait for a first replica."""
    num_requests: int = 0
    """Requests on the replicas, running or waiting there."""
    was_busy: bool = False
    """Whether a replica has computed since the last look."""
    is_starting: bool = False
    """Whether a replica is not ready yet, so that its effect on the load cannot be judged."""


class Scaler:
    """Decides the number of replicas: up to the least that was needed over a short while, down to
    the most that was needed over a long one."""

    def __init__(self, rules: ScaleRules, now: float) -> None:
        self.rules = rules
        self._since = self._calm_since = now
        """Time of the last change, and time since which all replicas are ready; samples from before
        do not count."""
        self._seen: deque[tuple[float, int, int]] = deque()
        """Samples of demand: time, replicas that the load needs, and replicas that it would keep
        busy."""

    def wanted(self, sight: Sight, now: float) -> int:
        """Number of replicas that there should be."""
        wanted = self._wanted(sight, now)
        if wanted != sight.num_replicas:
            self._since = self._calm_since = now
            self._seen.clear()
        return wanted

    def _wanted(self, sight: Sight, now: float) -> int:
        rules = self.rules
        there = sight.num_replicas
        self._look(sight, now)
        if sight.is_starting:
            self._calm_since = now
        if not rules.min_replicas <= there <= rules.max_replicas:
            return min(max(there, rules.min_replicas), rules.max_replicas)
        if there == 0:
            return min(1, sight.num_without_replica)
        if now - self._since >= UP_SECONDS:
            needed = min(need for at, need, _ in self._seen if at >= now - UP_SECONDS)
            if needed > there:
                return min(needed, rules.max_replicas)
        if now - self._calm_since >= rules.idle_seconds:
            kept = max(keep for at, _, keep in self._seen if at >= now - rules.idle_seconds)
            return max(min(kept, there), rules.min_replicas)
        return there

    def _look(self, sight: Sight, now: float) -> None:
        target = self.rules.target_requests
        load = sight.num_requests + sight.num_without_replica
        kept = max(math.ceil(load / (target * RELEASE)), int(sight.was_busy))
        self._seen.append((now, math.ceil(load / target), kept))
        while self._seen[0][0] < now - max(self.rules.idle_seconds, UP_SECONDS):
            self._seen.popleft()


def replica_bounds(
    fixed: int | None, most: int | None, least: int | None, usual: int
) -> tuple[int | None, int]:
    """The fewest replicas, None for a fixed number, and the most. Raises `SettingError`."""
    if most is None and least is None:
        return None, usual
    require(fixed is None, "replicas", fixed, "not together with --min-replicas and --max-replicas")
    most = most if most is not None else max(usual, least or 0)
    return (least if least is not None else min(1, most)), most
