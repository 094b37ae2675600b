"""The timeline of one prompt: the time at which it reached each stage, the decisions there, and how
long they took.

Shown in three ways: plain data to explain a request, spans for a collector, a receipt for the
client. Times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from headwater.proto import engine_pb2
from headwater.services.runtime.tracing import Span

from ..router.decision import Decision


class EngineStart(msgspec.Struct, frozen=True, gc=False):
    """Seconds that an engine reports when it has computed a prompt."""

    queue_seconds: float = 0.0
    """Time before its first step."""
    prefill_seconds: float = 0.0
    policy: str = ""
    """Queue policy of the engine."""
    fcfs_queue_seconds: float = 0.0
    """Time before its first step in order of arrival, as far as the engine can tell."""


class Attempt(msgspec.Struct, kw_only=True, gc=False):
    """One dispatch of a generation."""

    decision: Decision
    asked_at: float
    """Time at which the router was asked."""
    dispatched_at: float
    ended_at: float | None = None
    start: EngineStart | None = None
    """Set once the engine has computed the prompt. No message: it would keep all of its frame."""
    error: str = ""
    was_alone: bool = False
    """Whether no other suspect of an engine's death was being tried when the attempt was lost."""
    cause: str = ""
    """Cause of the loss, where the request went on elsewhere or might have."""

    def explained(self) -> dict[str, Any]:
        """The attempt as plain data."""
        return {
            "decision": self.decision.receipt,
            "route_seconds": self.dispatched_at - self.asked_at,
            "seconds": _between(self.dispatched_at, self.ended_at),
            "error": self.error or None,
            "cause": self.cause or None,
        }


class Timeline(msgspec.Struct, gc=False):
    """Times of one prompt. `None`: not reached, or not yet."""

    arrived_at: float = msgspec.field(default_factory=time.perf_counter)
    prepared_at: float | None = None
    queued_at: float | None = None
    """Time at which a replica of the model was there."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    policy: str = ""
    """Policy of the gateway's queue."""
    fcfs_seconds: float | None = None
    """Seconds that it would have waited in the gateway in order of arrival, as far as one can
    tell."""
    expected_tokens: int = 0
    """Predicted length of its answer."""
    outcome: str = "running"
    attempts: tuple[Attempt, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether all attempts computed with the same numerics, so that the answer has the tokens
        of a single attempt."""
        return len({attempt.decision.member.numerics_id for attempt in self.attempts}) <= 1

    @property
    def ttft(self) -> float | None:
        return _between(self.arrived_at, self.first_token_at)

    @property
    def seconds(self) -> float:
        """Seconds so far, or to its end."""
        return (self.ended_at or time.perf_counter()) - self.arrived_at

    @property
    def queue_seconds(self) -> float | None:
        """Seconds of waiting for a turn in the gateway."""
        return _between(self.queued_at, self.admitted_at)

    def waits(self) -> dict[str, Any]:
        """Seconds that the request waited for a turn and for a seat, and would have waited in order
        of arrival; None for a wait that has not begun."""
        start = next((each.start for each in self.attempts if each.start is not None), None)
        return {
            "policy": self.policy or None,
            "gateway": self.queue_seconds,
            "gateway_fcfs": self.fcfs_seconds,
            "engine_policy": start and start.policy,
            "engine": start and start.queue_seconds,
            "engine_fcfs": start and start.fcfs_queue_seconds,
            "expected_tokens": self.expected_tokens,
        }

    def forget_hashes(self) -> None:
        """Forgets the hashes of the prompt's blocks, which a long prompt has thousands of. To be
        called once no more attempts follow."""
        for attempt in self.attempts:
            attempt.decision.hashes = ()

    def to_spans(self, span: Span) -> None:
        """Adds the timeline's sections as parts of the request's span; an attempt is linked to the
        one before it."""
        if self.prepared_at is not None:
            span.part("prepare", self.arrived_at, self.prepared_at)
        if self.prepared_at is not None and self.queued_at is not None:
            span.part("replica", self.prepared_at, self.queued_at)
        if self.queued_at is not None and self.admitted_at is not None:
            span.part("queue", self.queued_at, self.admitted_at)
        before = None
        for number, attempt in enumerate(self.attempts, 1):
            decision = attempt.decision
            fields = {"replica": decision.replica_id, "reason": decision.reason, "attempt": number}
            fields |= {"predicted_cached_tokens": decision.predicted_cached_tokens}
            span.part("route", attempt.asked_at, attempt.dispatched_at, **fields)
            if attempt.ended_at is not None:
                before = span.part(
                    "stream",
                    attempt.dispatched_at,
                    attempt.ended_at,
                    behind=before,
                    error=attempt.error,
                    **fields,
                )

    def stretches(self) -> dict[str, float | None]:
        """Seconds of each section, in their order; `engine_` ones are by the engine's clock."""
        last = self.attempts[-1] if self.attempts else None
        start = last.start if last is not None else None
        return {
            "prepare": _between(self.arrived_at, self.prepared_at),
            "replica": _between(self.prepared_at, self.queued_at),
            "queue": self.queue_seconds,
            "route": sum(each.dispatched_at - each.asked_at for each in self.attempts),
            "engine_queue": start.queue_seconds if start is not None else None,
            "engine_prefill": start.prefill_seconds if start is not None else None,
            "to_first_token": self.ttft,
            "after_first_token": _between(
                self.first_token_at, last.ended_at if last is not None else None
            ),
            "total": self.seconds,
        }


def work_fields(works: Iterable[engine_pb2.Work | None]) -> dict[str, Any] | None:
    """Reported work of the last engine of each choice, added up, as plain data."""
    done = [work for work in works if work is not None]
    if not done:
        return None
    steps = sum(work.steps for work in done)
    return {
        "steps": steps,
        "tokens_per_step": round(sum(work.output_tokens for work in done) / max(steps, 1), 2),
        "draft_tokens": sum(work.draft_tokens for work in done),
        "accepted_tokens": sum(work.accepted_tokens for work in done),
        "mean_batch_size": round(
            sum(work.mean_batch * work.steps for work in done) / max(steps, 1), 2
        ),
        "preemptions": sum(work.preemptions for work in done),
        "kv_bytes": _kv_bytes_of(done),
        "experts": _experts_of(done),
        "weights": weights_of(done),
    }


def weights_of(works: Iterable[engine_pb2.Work | None]) -> list[dict[str, str]]:
    """Weights that computed choices, each once; several where they were replaced meanwhile."""
    found = {
        (each.revision, each.numerics_id): None
        for work in works
        if work is not None
        for each in work.weights
    }
    return [{"revision": revision, "numerics_id": name} for revision, name in found]


def _kv_bytes_of(works: Iterable[engine_pb2.Work]) -> dict[str, int]:
    """Bytes of pages that choices held at their ends, by kind of layer. Shared pages count for each
    choice."""
    found = Counter[str]()
    for work in works:
        found.update(work.kv_bytes)
    return dict(found)


def _experts_of(works: list[engine_pb2.Work]) -> dict[str, Any] | None:
    """Experts of the model when the last of these ended; None: it has none, or none were
    counted."""
    found = [work.experts for work in works if work.HasField("experts")]
    if not found:
        return None
    return {
        "largest_share": round(found[-1].largest_share, 4),
        "step_experts": found[-1].step_experts,
        "step_bytes": found[-1].step_bytes,
    }


def _between(began: float | None, ended: float | None) -> float | None:
    return ended - began if began is not None and ended is not None else None
