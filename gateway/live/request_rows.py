"""Rows of requests: those that run, with where they are now, and the last that have ended. No
prompt and no answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from ..request.generation import Generation
from ..request.timeline import Timeline
from ..request.timelines import Explanation

MAX_RUNNING = 60
MAX_RECENT = 20


class _Prompt(msgspec.Struct):
    """Part of an ended prompt's timeline that a row shows."""

    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: dict[str, float | None]
    attempts: list[_Attempt]


class _Attempt(msgspec.Struct):
    decision: _Decision


class _Decision(msgspec.Struct):
    replica_id: str


_prompts = msgspec.json.Decoder(_Prompt)


def running_rows(prompts: Iterable[Generation], gateway_id: str) -> list[dict[str, Any]]:
    """Rows of the oldest prompts that wait or run."""
    return [_running(each, gateway_id) for each in itertools.islice(prompts, MAX_RUNNING)]


def recent_rows(explanations: Iterable[Explanation]) -> list[dict[str, Any]]:
    """Rows of the requests that ended last."""
    return [_ended(each) for each in itertools.islice(explanations, MAX_RECENT)]


def oldest_running(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several gateways as one list."""
    return sorted(rows, key=lambda row: row["seconds"]["total"] or 0.0, reverse=True)[:MAX_RUNNING]


def last_ended(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several gateways as one list, the last that ended first."""
    return sorted(
        rows, key=lambda row: row["created"] + (row["seconds"]["total"] or 0.0), reverse=True
    )[:MAX_RECENT]


def _running(generation: Generation, gateway_id: str) -> dict[str, Any]:
    timeline = generation.timeline
    caller = generation.request.caller
    return {
        "id": caller.request_id,
        "gateway": gateway_id,
        "tenant": caller.tenant.id,
        "model": generation.request.model,
        "state": _state(timeline),
        "replica": generation.decision.replica_id if generation.decision is not None else None,
        "attempts": generation.attempt,
        "prompt_tokens": generation.num_prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "output_tokens": generation.num_output_tokens,
        "seconds": timeline.stretches(),
    }


def _state(timeline: Timeline) -> str:
    """Phase in which a prompt is."""
    if timeline.prepared_at is None:
        return "preparing"
    if timeline.queued_at is None:
        return "waiting for an engine"
    if timeline.admitted_at is None:
        return "queued"
    return "prefill" if timeline.first_token_at is None else "decode"


def _ended(explanation: Explanation) -> dict[str, Any]:
    """Row of a request, from its first prompt that has ended; tokens are those of all its
    prompts."""
    prompts = [_prompts.decode(raw) for raw in explanation.prompts]
    first = prompts[0]
    return {
        "id": explanation.id,
        "gateway": explanation.gateway,
        "created": explanation.created,
        "tenant": explanation.tenant,
        "model": explanation.model,
        "state": first.outcome,
        "replica": first.attempts[-1].decision.replica_id if first.attempts else None,
        "attempts": len(first.attempts),
        "prompt_tokens": sum(each.prompt_tokens for each in prompts),
        "cached_tokens": sum(each.cached_tokens for each in prompts),
        "output_tokens": sum(each.output_tokens for each in prompts),
        "seconds": first.seconds,
    }
