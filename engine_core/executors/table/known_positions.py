"""Turns plans that leave drafts and positions to the executor into plans that name them, for
executors that compute each plan before the next one is submitted, and so know the position of each
row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...executor import Int32Array, StepPlan

Draft = Callable[[int, int, int], Int32Array]
"""Function that drafts: (table row, number of known tokens, most drafts) → drafts."""


def with_device_drafts(plan: StepPlan, num_known: Int32Array, draft: Draft) -> StepPlan:
    """num_known [rows of the table] counts the tokens that the executor has written, sampled ones
    included."""
    plan = at_known_positions(plan, num_known)
    if plan.num_drafts is None or plan.draft_ids is not None:
        return plan
    drafted = np.flatnonzero(plan.num_drafts).tolist()
    # Rows that draft are decode rows: one known token is not computed yet.
    parts = [
        draft(int(plan.rows[i]), int(plan.starts[i]) + 1, int(plan.num_drafts[i])) for i in drafted
    ]
    num_drafts = np.zeros_like(plan.num_drafts)
    num_drafts[drafted] = [len(part) for part in parts]
    draft_ids = np.concatenate([*parts, NOTHING]).astype(np.int32)
    return replace(
        plan,
        counts=plan.counts - plan.num_drafts + num_drafts,
        num_drafts=num_drafts,
        draft_ids=draft_ids,
    )


def at_known_positions(plan: StepPlan, num_known: Int32Array) -> StepPlan:
    """The plan with the positions at which its rows are."""
    if plan.follows is None:
        return plan
    behind = np.where(plan.follows, plan.starts + 1 - num_known[plan.rows], 0).astype(np.int32)
    return replace(
        plan, starts=plan.starts - behind, output_indices=plan.output_indices - behind, follows=None
    )


def with_at_most(plan: StepPlan, most: int) -> StepPlan:
    """The plan with as many drafts of the executor for each row as it can draft."""
    if plan.num_drafts is None or plan.draft_ids is not None or not (plan.num_drafts > most).any():
        return plan
    num_drafts = np.minimum(plan.num_drafts, most).astype(np.int32)
    return replace(plan, counts=plan.counts - plan.num_drafts + num_drafts, num_drafts=num_drafts)


def repeated(known: Int32Array, most: int) -> Int32Array:
    """Tokens that followed an earlier occurrence of the last token, up to `most` of them."""
    places = np.flatnonzero(known[:-1] == known[-1])
    return known[places[-1] + 1 :][:most] if places.size else NOTHING


NOTHING: Int32Array = np.empty(0, np.int32)
