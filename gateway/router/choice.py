"""Picks one of the candidates for a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from . import policy, rendezvous
from .decision import Candidate

_MAX_PREFIXES = 20_000
"""Number of prefixes whose last replicas are remembered."""


class LastServed:
    """When each replica last got a prompt with a prefix."""

    def __init__(self) -> None:
        self._times: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def of(self, prefix: bytes) -> Mapping[str, float]:
        """Times by replica id; none for a prefix that was not sent or is forgotten."""
        return self._times.get(prefix, {})

    def note(self, hashes: tuple[bytes, ...], replica_id: str, now: float) -> None:
        prefix = rendezvous.prefix_of(hashes)
        self._times.setdefault(prefix, {})[replica_id] = now
        self._times.move_to_end(prefix)
        if len(self._times) > _MAX_PREFIXES:
            self._times.popitem(last=False)


def pick(
    able: list[Candidate], hashes: tuple[bytes, ...], last_served: LastServed
) -> tuple[Candidate, str]:
    """The best candidate; of those about as good, the one with the fewest requests, then the
    one least recently used for the prefix; for a prompt that is cached nowhere, first the one
    whose cache has the most room."""
    if len(able) == 1:
        return able[0], "only"
    prefix = rendezvous.prefix_of(hashes)
    if prefix and not any(each.is_synced or each.parts.matched_tokens for each in able):
        return _nearest(able, prefix), "home"
    best = min(able, key=lambda each: each.cost)
    limit = best.cost * (1 + policy.SPREAD)
    served = last_served.of(prefix)
    is_new = not any(each.parts.matched_tokens for each in able)
    chosen = min(
        (each for each in able if each.cost <= limit),
        key=lambda each: (
            each.cached if is_new else 0,
            each.parts.num_requests,
            served.get(each.replica_id, 0.0),
            each.cost,
        ),
    )
    if chosen is not best and chosen.cost > best.cost:
        return chosen, "spread"
    return chosen, "prefix" if chosen.parts.matched_tokens else "load"


def _nearest(able: list[Candidate], prefix: bytes) -> Candidate:
    """The prefix's home, unless waiting there costs more than to compute the prefix elsewhere."""
    by_id = {each.replica_id: each for each in able}
    limit = min(policy.load_only(each.parts) + policy.ALPHA * each.parts.own for each in able)
    order = [by_id[replica_id] for replica_id in rendezvous.by_distance(prefix, list(by_id))]
    return next((each for each in order if policy.load_only(each.parts) <= limit), order[0])
