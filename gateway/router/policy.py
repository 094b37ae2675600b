"""Policies, which say which candidate is best: a policy is an expression over the parts of a cost;
the lowest value wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .cost import Parts

ALPHA = 2.0
"""A second of this request's prefill weighs more than one of waiting: it also keeps others
waiting."""
BETA = 0.3
"""The cost of evicted blocks weighs less than a second of waiting: it is paid later, if at all."""
LAMBDA = 1.0
"""Decode steps by which a slower batch is felt."""
SPREAD = 0.05
"""Candidates within so much of the best are equal."""

Policy = Callable[[Parts], float]


def seconds(parts: Parts) -> float:
    return (
        parts.drain
        + ALPHA * parts.own
        + parts.pressure
        + LAMBDA * parts.slow
        + parts.hand_over
        + parts.adapter
        + parts.stall
        + BETA * parts.evict
    )


def load_only(parts: Parts) -> float:
    """The cost as `seconds` has it, for a request whose prefill costs the same everywhere."""
    return parts.drain + parts.pressure + LAMBDA * parts.slow + parts.hand_over + parts.adapter


def fewest_requests(parts: Parts) -> float:
    return float(parts.num_requests)


POLICIES: Mapping[str, Policy] = {
    "seconds": seconds,
    "load": load_only,
    "requests": fewest_requests,
}
"""Policies by the names that `--routing-policy` takes (`ROUTING_POLICIES` of the settings). Their
values are at least 0: candidates within `SPREAD` of the best are equal."""
