"""The replica that the chosen one may pull the beginning of a prompt from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .decision import Candidate, Decision, Holder
from .replica import Incarnation, Replica


def replica_of(replicas: Mapping[str, Replica], incarnation: Incarnation | None) -> Replica | None:
    """The replica of an incarnation; None where that incarnation has left."""
    found = replicas.get(incarnation[0]) if incarnation is not None else None
    return found if found is not None and found.incarnation == incarnation else None


def num_lent_tokens(
    replicas: Mapping[str, Replica],
    matched: Mapping[str, int],
    failed: Collection[Incarnation],
    now: float,
) -> int:
    """Tokens of a prompt that a replica has most of and may lend. `matched`: blocks of the prompt
    that each replica has; `failed` are those that failed the request."""
    able = (
        replica.block_size * matched.get(replica_id, 0)
        for replica_id, replica in replicas.items()
        if replica.incarnation not in failed and not replica.breaker.is_open(now)
    )
    return max(able, default=0)


def find_holder(
    replicas: Mapping[str, Replica],
    owner: Replica | None,
    decision: Decision,
    chosen: Candidate,
    seen: list[Candidate],
) -> Holder | None:
    """The replica with the longest cached prefix, if it is longer than the chosen one's: its blocks
    may be pulled sooner than computed. A replica that has failed lends nothing."""
    if owner is not None and owner.member.replica_id != chosen.replica_id:
        holder = owner
        num_tokens = decision.num_prompt_tokens
    else:
        able = [each for each in seen if each.guard not in ("failed", "failing")]
        best = max(able, key=lambda each: each.parts.matched_tokens, default=chosen)
        holder = replicas[best.replica_id]
        num_tokens = best.parts.matched_tokens
    if num_tokens <= chosen.parts.matched_tokens:
        return None
    return (
        Holder(holder.member, num_tokens)
        if holder.member.numerics_id == decision.member.numerics_id
        else None
    )
