"""A decision of the router and its reasons. A receipt holds everything that is needed to score the
decision again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import msgspec

from headwater.services.runtime.member import Member

from .cost import TIMES, Parts

MAX_SHOWN = 64
"""Largest number of candidates in a receipt: more would cost more than the decision."""


class Candidate(msgspec.Struct, eq=False, gc=False):
    """A replica as the router saw it."""

    replica_id: str
    parts: Parts
    cost: float
    """Seconds, under the policy that decided."""
    trust: float
    is_synced: bool
    """Whether the index has applied all events of the replica so far."""
    load_age: float
    """Seconds since its last load message; −1: none came yet."""
    guard: str
    """Why it was skipped; empty: it was not."""
    cached: int
    """Sixteenths of its cache that are in use."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica that the index says has the first tokens of a prompt."""

    member: Member
    num_tokens: int


class Decision(msgspec.Struct, kw_only=True, gc=False):
    """The chosen replica. `receipt` is plain data, for logs and for clients that ask."""

    member: Member
    reason: str
    """`prefix`, `load`, `spread`, `home` (no index: consistent hash) or `only` (one candidate)."""
    candidates: tuple[Candidate, ...]
    """Candidates, as many as a receipt shows."""
    num_candidates: int
    hashes: tuple[bytes, ...]
    """Hashes of the prompt's blocks; none once its request has ended."""
    num_prompt_tokens: int
    num_matched_blocks: int
    """Blocks of the prompt that the index has for the chosen replica."""
    block_size: int
    predicted_cached_tokens: int
    predicted_seconds: float
    """Predicted time until the prompt is computed."""
    adapter: bytes = b""
    """Hash of the adapter of the request; empty: none."""
    holder: Holder | None = None
    """Another replica that may have more of the prompt cached than the chosen one."""
    successor: Member | None = None
    """The replica that is expected to go on, where the chosen one computes the prompt and one
    token. The next attempt may still choose another one."""
    max_chunk_tokens: int = 0
    """Most tokens of a prompt that the replica computes in one step; 0: unknown."""
    actual_cached_tokens: int | None = None
    """Known when the prompt is computed; as is the next."""
    actual_seconds: float | None = None

    @property
    def replica_id(self) -> str:
        return self.member.replica_id

    @property
    def incarnation(self) -> tuple[str, int]:
        return self.member.replica_id, self.member.epoch

    @property
    def address(self) -> str:
        return self.member.address

    @property
    def hands_over(self) -> bool:
        """Whether another replica decodes after the first token."""
        return self.successor is not None

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_prompt_tokens - self.predicted_cached_tokens

    @property
    def receipt(self) -> dict[str, Any]:
        return {
            "replica_id": self.replica_id,
            "epoch": f"{self.member.epoch:016x}",
            "address": self.address,
            "numerics_id": self.member.numerics_id,
            "weights": self.member.weights or None,
            "reason": self.reason,
            "prompt_tokens": self.num_prompt_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "actual_cached_tokens": self.actual_cached_tokens,
            "hands_over": self.hands_over,
            "successor": None if self.successor is None else self.successor.replica_id,
            "holder": None if self.holder is None else _held(self.holder),
            "predicted_prefill_seconds": round(self.predicted_seconds, 6),
            "actual_prefill_seconds": round(self.actual_seconds, 6)
            if self.actual_seconds is not None
            else None,
            "num_candidates": self.num_candidates,
            "candidates": [_plain(candidate) for candidate in self.candidates],
        }


def _held(holder: Holder) -> dict[str, Any]:
    return {"replica_id": holder.member.replica_id, "tokens": holder.num_tokens}


def shown(seen: Sequence[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    """Candidates that a receipt lists: all; of more than `MAX_SHOWN` the cheapest, and the chosen
    one."""
    if len(seen) <= MAX_SHOWN:
        return tuple(seen)
    best = nsmallest(MAX_SHOWN, seen, key=lambda each: each.cost)
    return tuple(best if chosen in best else [chosen, *best[:-1]])


def _plain(candidate: Candidate) -> dict[str, Any]:
    parts = candidate.parts
    return {
        "replica_id": candidate.replica_id,
        "cost_seconds": round(candidate.cost, 6),
        **{f"{name}_seconds": round(getattr(parts, name), 6) for name in TIMES},
        "matched_tokens": parts.matched_tokens,
        "num_requests": parts.num_requests,
        "filled": round(parts.filled, 4),
        "trust": round(candidate.trust, 4),
        "synced": candidate.is_synced,
        "load_age_seconds": round(candidate.load_age, 4),
        "guard": candidate.guard,
    }
