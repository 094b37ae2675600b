"""Requests that wait for a replica, by model and tenant."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headwater.proto.events_pb2 import TenantDemand

MOST_TENANTS = 64
"""Tenants of a model that a message names: those whose requests have waited longest."""


class _Waiting(NamedTuple):
    tenant: str
    weight: float
    since: float


class WaitingTenants:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        """Waiting requests by model, then by number, in the order of arrival. A model whose last
        request has left stays until that was reported."""

    def add(self, model: str, tenant: str, weight: float) -> int:
        """Takes a request, and returns a number for it."""
        number = next(self._numbers)
        self._waiting.setdefault(model, {})[number] = _Waiting(tenant, weight, self._clock())
        return number

    def remove(self, model: str, number: int) -> None:
        del self._waiting[model][number]

    @property
    def models(self) -> list[str]:
        """Models with waiting requests, and those that have had some since they were reported."""
        return list(self._waiting)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of waiting requests, by each of these models."""
        return {model: len(waiting) for model, waiting in self._waiting.items()}

    def tenants_of(self, model: str) -> list[TenantDemand]:
        """The oldest request of each tenant that waits for a model."""
        now = self._clock()
        oldest: dict[str, _Waiting] = {}
        for each in self._waiting[model].values():
            oldest.setdefault(each.tenant, each)
        return [
            TenantDemand(tenant=each.tenant, waited_seconds=now - each.since, weight=each.weight)
            for each in list(oldest.values())[:MOST_TENANTS]
        ]

    def forget_if_empty(self, model: str) -> None:
        if not self._waiting[model]:
            del self._waiting[model]
