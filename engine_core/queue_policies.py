"""Queue policies: the order in which a tenant's requests are computed. A policy is an expression
over the facts of one request; the request with the smallest value goes first.

Gateways and engines order by these expressions. A policy orders within a tenant's share: it does
not decide what share a tenant gets. Knows nothing about queues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

AGING = 0.2
"""Under `srpt`, seconds of work that one second of waiting outweighs: a request that has waited for
five seconds precedes a newer one that takes one second less."""
QUANTUM_TOKENS = 256
"""Tokens of the first level of `mlfq`; each level has twice as many as the one before it."""
LAST_LEVEL = 7
"""Level of all requests with more tokens, which are in order of arrival among themselves."""
PROMOTION_SECONDS = 20.0
"""Time without progress after which a request under `mlfq` begins again at the first level."""
NO_GOAL_SECONDS = 30.0
"""Time to the first token that `slo` plans for where a request has no goal. It is never refused."""
BLOCKED_SECONDS = 2.0
"""Seconds for which others may pass a request that finds too few blocks. Then freed blocks are kept
for that request."""
DEFAULT_SECONDS_PER_TOKEN = 1 / 2000
"""Time of a prompt token while none was measured; only relations matter until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Knowledge about a request in a queue. Times are seconds of the queue's clock."""

    arrived_at: float
    """Time at which the request came to the cluster."""
    virtual_time: float = 0.0
    """Virtual time of the request in its tenant's fair order."""
    num_prompt_tokens: int = 0
    """Known tokens still to compute, cached ones left out."""
    num_answer_tokens: float = 0.0
    """Tokens that the rest of its answer is predicted to have."""
    num_level: int = 0
    """Tokens that decide its level: uncached prompt tokens, and answer tokens since it last started
    again at the first level."""
    seconds_per_token: float = DEFAULT_SECONDS_PER_TOKEN
    """Time in which a prompt token is computed."""
    first_token_by: float = math.inf
    """Time by which the first token is due; infinite where there is no goal."""

    @property
    def work_seconds(self) -> float:
        """Time to compute the rest of the request, alone and at the speed of a prompt."""
        return self.seconds_per_token * (self.num_prompt_tokens + self.num_answer_tokens)

    @property
    def level(self) -> int:
        """Level of feedback queues. A long prompt skips the levels whose quantum is less than it,
        and each token moves it on. See Wu et al., Fast Distributed Inference Serving for Large
        Language Models (2023)."""
        quanta = self.num_level / QUANTUM_TOKENS
        return min(LAST_LEVEL, math.ceil(math.log2(quanta))) if quanta > 1 else 0

    @property
    def due(self) -> float:
        """Time by which the first token is due, also where the request has no goal."""
        return min(self.first_token_by, self.arrived_at + NO_GOAL_SECONDS)


Preempts = Callable[[float, float, float], bool]
"""Whether a waiting request takes the seat of a running one. Arguments: key of the waiting one, key
of the running one, and seconds in which the running one could be resumed where it was."""


def never(waiting: float, running: float, resume_seconds: float) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An order by name, and what may be done to keep it."""

    name: str
    key: Callable[[Facts], float]
    has_tiers: bool = True
    """Whether a lower tier goes before a higher one, whatever the keys."""
    orders_tenants: bool = False
    """Whether keys of different tenants are compared. Otherwise the tenant that was given least
    goes first, by virtual time."""
    passes_blocked: bool = True
    """Whether others go on when a request finds too few blocks."""
    overtakes: bool = False
    """Whether a request precedes a later one of its tenant whose prefill is under way."""
    preempts: Preempts = never
    promotes: bool = False
    """Whether a request begins again at the first level when it has made no progress."""
    refuses: bool = False
    """Whether a request is refused whose first token cannot come in time."""


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name="fcfs",
            key=lambda facts: facts.arrived_at,
            has_tiers=False,
            passes_blocked=False,
        ),
        Policy(name="priority", key=lambda facts: facts.arrived_at),
        Policy(
            name="fair",
            key=lambda facts: facts.virtual_time,
            orders_tenants=True,
            passes_blocked=False,
        ),
        Policy(
            name="srpt",
            key=lambda facts: facts.work_seconds + AGING * facts.arrived_at,
            overtakes=True,
            preempts=lambda waiting, running, resume_seconds: waiting + resume_seconds < running,
        ),
        Policy(
            name="mlfq",
            key=lambda facts: facts.level,
            overtakes=True,
            preempts=lambda waiting, running, resume_seconds: waiting < running,
            promotes=True,
        ),
        Policy(
            name="slo",
            key=lambda facts: facts.due,
            overtakes=True,
            refuses=True,
        ),
    )
}
DEFAULT = "fair"
SHORTEST_FIRST = "srpt"
ALLOWED = (
    f"one of {', '.join(POLICIES)}, and after it TIER=POLICY for single tiers, as fair,1=srpt; "
    "fcfs has no tiers"
)


class PolicyError(ValueError):
    """A choice of policies that cannot be read."""

    def __init__(self, text: str) -> None:
        super().__init__(f"policy is {text!r}; allowed: {ALLOWED}")


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy of a model, and of tenant tiers with another one."""

    default: Policy = POLICIES[DEFAULT]
    by_tier: Mapping[int, Policy] = field(default_factory=dict)

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, text: str) -> Policies:
        """Reads `fair` or `fair,1=srpt,2=mlfq`; empty: the default. Raises `PolicyError`."""
        name, *others = (text or DEFAULT).split(",")
        by_tier = {}
        for other in others:
            tier, _, policy = other.partition("=")
            is_known = tier.isascii() and tier.isdigit() and policy in POLICIES
            if not is_known or not POLICIES[policy].has_tiers or int(tier) in by_tier:
                raise PolicyError(text)
            by_tier[int(tier)] = POLICIES[policy]
        if name not in POLICIES or (by_tier and not POLICIES[name].has_tiers):
            raise PolicyError(text)
        return cls(POLICIES[name], by_tier)

    def of_tier(self, tier: int) -> Policy:
        return self.by_tier.get(tier, self.default)

    def tier(self, tier: int) -> int:
        """Tier by which a request is ordered."""
        return tier if self.default.has_tiers else 0

    @property
    def all(self) -> tuple[Policy, ...]:
        return (self.default, *self.by_tier.values())
