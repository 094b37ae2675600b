"""The replica that the chosen one may pull the beginning of a prompt from."""

from __future__ import annotations

from collections.abc import Mapping

from .decision import Candidate, Decision, Holder
from .replica import Incarnation, Replica


def replica_of(replicas: Mapping[str, Replica], incarnation: Incarnation | None) -> Replica | None:
    """None where that incarnation has left."""
    found = replicas.get(incarnation[0]) if incarnation is not None else None
    return found if found is not None and found.incarnation == incarnation else None


def find_holder(
    replicas: Mapping[str, Replica], owner: Replica | None, decision: Decision, chosen: Candidate, seen: list[Candidate]
) -> Holder | None:
    """The replica that has most of the prompt, where that is more than the chosen one has: its blocks may come sooner
    from there than they are computed. One that has failed lends nothing."""
    best = max(seen, key=lambda each: each.parts.matched_tokens)
    num_tokens = best.parts.matched_tokens
    holder = replicas[best.replica_id] if best.guard not in ("failed", "failing") else None
    if owner is not None and owner.member.replica_id != chosen.replica_id:
        holder, num_tokens = owner, decision.num_prompt_tokens
    if holder is None or num_tokens <= chosen.parts.matched_tokens:
        return None
    return Holder(holder.member, num_tokens) if holder.member.numerics_id == decision.member.numerics_id else None
