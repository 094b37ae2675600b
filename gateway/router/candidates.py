"""Scores the replicas of a model for one prompt, and says which of them may take it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from headwater.services.index.kv_index import KvIndex
from headwater.services.runtime.errors import Unavailable

from .decision import Candidate, Decision, shown
from .disaggregation import MISPLACED, Disaggregation
from .holders import num_lent_tokens
from .policy import Policy
from .rates import Rates
from .replica import Incarnation, Replica

NO_ADAPTER = "no adapter"
"""Guard of a replica that does not hold the request's adapter; it never gives way."""
LAST_RESORT = (MISPLACED, "full", "inexact", "failing", "asleep")
"""Guards that are overruled, in this order, when every replica has a guard."""


class Asked(msgspec.Struct, frozen=True):
    """A prompt for which a replica is looked for; see `Router.choose`."""

    hashes: tuple[bytes, ...]
    num_tokens: int
    num_answer_tokens: int
    """Predicted."""
    exclude: Collection[Incarnation]
    numerics_id: str
    owner: Replica | None
    """The lender, where it is still there."""
    adapter: bytes
    """Hash of the adapter's content; empty: none."""


def look(
    index: KvIndex,
    replicas: Mapping[str, Replica],
    asked: Asked,
    roles: Disaggregation,
    score: Policy,
    rates: Mapping[str, Rates],
    now: float,
) -> list[Candidate]:
    """Scores every replica of a model."""
    num_tokens = asked.num_tokens
    matched = index.lookup(asked.hashes)
    num_lent = (
        num_tokens
        if asked.owner is not None
        else num_lent_tokens(replicas, matched, asked.exclude, now)
        if matched
        else 0
    )
    seen = []
    for replica_id, replica in replicas.items():
        matched_tokens = matched.get(replica_id, 0) * replica.block_size
        if replica is asked.owner:
            # Events of these blocks may not have arrived yet.
            matched_tokens = num_tokens
        of_kind = rates[replica.member.numerics_id]
        parts = replica.parts(
            num_tokens,
            matched_tokens,
            asked.num_answer_tokens,
            of_kind,
            now,
            num_lent,
            asked.adapter,
        )
        parts = roles.with_costs(replica, parts, num_tokens, of_kind)
        guard = "failed" if replica.incarnation in asked.exclude else replica.guard(parts, now)
        guard = guard if replica.has_adapter(asked.adapter) else NO_ADAPTER
        if not guard and asked.numerics_id and replica.member.numerics_id != asked.numerics_id:
            guard = "inexact"
        guard = guard or roles.guard(replica)
        is_synced, cached = replica.standing(index.column(replica_id))
        age = replica.load_age(now)
        seen.append(
            Candidate(
                replica_id,
                parts,
                score(parts),
                replica.trust.value,
                is_synced,
                age,
                guard,
                cached,
            )
        )
    return seen


def able(seen: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no guard excludes. If there are none, those of the first guard that may be
    overruled. Raises `Unavailable` where there are none either."""
    for allowed in ("", *LAST_RESORT):
        free = [each for each in seen if each.guard == allowed]
        if free:
            return free
    raise _none_left(seen)


def decide(
    replica: Replica,
    chosen: Candidate,
    reason: str,
    seen: Sequence[Candidate],
    hashes: tuple[bytes, ...],
    num_prompt_tokens: int,
) -> Decision:
    block_size = replica.block_size
    parts = chosen.parts
    return Decision(
        member=replica.member,
        reason=reason,
        candidates=shown(seen, chosen),
        num_candidates=len(seen),
        hashes=hashes,
        num_prompt_tokens=num_prompt_tokens,
        num_matched_blocks=parts.matched_tokens // block_size,
        block_size=block_size,
        max_chunk_tokens=replica.load.reported.max_chunk_tokens,
        # A token is always computed, and only whole blocks are found.
        predicted_cached_tokens=min(parts.matched_tokens, num_prompt_tokens - 1)
        // block_size
        * block_size,
        predicted_seconds=parts.drain + parts.own,
    )


def _none_left(seen: Sequence[Candidate]) -> Unavailable:
    if not seen:
        return Unavailable("no replica of the model is within reach", code="no_replica")
    reasons = ", ".join(f"{each.replica_id} {each.guard}" for each in seen)
    return Unavailable(f"no replica can take the request: {reasons}", code="no_replica")
