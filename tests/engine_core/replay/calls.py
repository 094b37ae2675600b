"""Calls of an executor in their order, with what each plan gave.

A stream of calls holds plans and no requests: it can be made on one executor and repeated on
another, whatever scheduler the other code has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from headwater.engine_core.executor import DrawPlan, Int32Array, StepPlan, StepResult, SwapPlan
from headwater.engine_core.ragged import places
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling.verification import positions_of

Plan = TypeVar("Plan", StepPlan, DrawPlan, SwapPlan)
NUM_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Submit:
    """`Executor.submit`."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Draw:
    """`Executor.draw`."""

    plan: DrawPlan
    """With no masks."""
    masks: Int32Array
    """[P, words] of the plan's positions, row by row."""


@dataclass(frozen=True, slots=True)
class Swap:
    """`Swapper.swap`."""

    plan: SwapPlan


@dataclass(frozen=True, slots=True)
class AwaitCopies:
    """Calls behind this one rely on so many copies, counted from the stream's first."""

    num_saved: int
    num_loaded: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's result by table row, with digests of all numbers that are no tokens."""

    tokens: dict[int, list[int]]
    """Of each row that sampled."""
    digests: dict[int, str]
    """Of each row's log probabilities and number of drafts."""
    prompts: dict[int, str]
    """Digests of log probabilities of prompts."""
    embeddings: dict[int, str]
    """Digests of pooled hidden states."""


@dataclass(frozen=True, slots=True)
class Retire:
    """`Executor.retire`."""

    step: int
    outcome: Outcome


Call = Submit | Draw | Swap | AwaitCopies | Retire
NO_MASKS: Int32Array = np.empty((1, 0, 0), np.int32)


def kept(plan: Plan) -> Plan:
    """A copy that nothing else writes to."""
    assert is_dataclass(plan)
    arrays: dict[str, Any] = {
        field.name: value.copy()
        for field in fields(plan)
        if isinstance(value := getattr(plan, field.name), np.ndarray)
    }
    return replace(plan, **arrays)


def kept_draw(plan: DrawPlan) -> Draw:
    """A draw with its own masks alone."""
    place, rows = _positions(plan)
    return Draw(kept(replace(plan, masks=NO_MASKS)), plan.masks[place, rows].copy())


def draw_of(call: Draw, masks: Int32Array) -> DrawPlan:
    """The plan over a table of masks [positions, table rows, words], which its own are written
    to."""
    masks[_positions(call.plan)] = call.masks
    return replace(call.plan, masks=masks)


def sampled_rows(plan: StepPlan | DrawPlan) -> list[int]:
    """Table rows in the order of the result's entries."""
    rows = plan.rows[plan.samples] if isinstance(plan, StepPlan) else plan.rows
    found: list[int] = rows.tolist()
    return found


def outcome_of(rows: Sequence[int], result: StepResult) -> Outcome:
    """`rows`: see `sampled_rows`."""
    width = result.token_ids.shape[1]
    counts = result.num_tokens.tolist()
    assert len(rows) == len(counts) == len(result.token_ids)
    tokens: dict[int, list[int]] = {}
    digests: dict[int, str] = {}
    for entry, (row, count) in enumerate(zip(rows, counts, strict=True)):
        tokens[row] = result.token_ids[entry, :count].tolist()
        scores = [result.logprobs.get(width * entry + i) for i in range(count)]
        drafts = None if result.num_drafts is None else int(result.num_drafts[entry])
        digests[row] = digest([drafts, *map(_plain, scores)])
    return Outcome(
        tokens=tokens,
        digests=digests,
        prompts={
            row: digest(list(map(_plain, entries)))
            for row, entries in sorted(result.prompt_logprobs.items())
        },
        embeddings={
            row: hashlib.sha256(vector).hexdigest()[:NUM_DIGITS]
            for row, vector in sorted(result.embeddings.items())
        },
    )


def digest(value: Any) -> str:
    """Of plain values, floats to their last bit."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:NUM_DIGITS]


def _plain(scores: TokenLogprobs | None) -> Any:
    return None if scores is None else asdict(scores)


def _positions(plan: DrawPlan) -> tuple[Int32Array, Int32Array]:
    """Places [P] of the drawn positions among those of their row, and table rows [P]."""
    num_positions = positions_of(plan.num_drafts, len(plan.rows))
    return places(num_positions), np.repeat(plan.rows, num_positions)
