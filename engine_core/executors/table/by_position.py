"""A plan with drafts as one without: each token of a drafted row becomes a row of one token, of the
same table row.

Keys and values of a step's tokens are stored before its attention reads any, and each row reads as
many keys as its position has, so such rows compute what they would one step after another. Their
common blocks are read once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...executor import DrawPlan, Int32Array, StepPlan
from ...ragged import places


def plan_by_position(plan: StepPlan) -> StepPlan:
    """Plan with a row for each position of the rows that have drafts. Like all decode rows, these
    come first in a plan; other rows are unchanged."""
    if plan.num_drafts is None:
        return plan
    num_rows = plan.num_drafts + 1
    place = places(num_rows)
    return replace(
        plan,
        rows=np.repeat(plan.rows, num_rows),
        starts=np.repeat(plan.starts, num_rows) + place,
        counts=np.repeat(plan.counts - plan.num_drafts, num_rows),
        samples=np.repeat(plan.samples, num_rows),
        holds=np.repeat(plan.holds, num_rows),
        output_indices=np.repeat(plan.output_indices, num_rows) + place,
        num_drafts=None,
        draft_ids=None,
        # The tokens of a drafted row read the same blocks.
        shares=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPositions:
    """The positions of a draw, row by row, [P] each."""

    rows: Int32Array
    """Table rows."""
    place: Int32Array
    """Index of each position in its row: 0, or 1 plus the index of a draft."""
    positions: Int32Array
    """Position at which the token is written."""
    output_indices: Int32Array


def draw_by_position(plan: DrawPlan) -> DrawPositions:
    if plan.num_drafts is None:
        place = np.zeros(len(plan.rows), np.int32)
        return DrawPositions(
            rows=plan.rows,
            place=place,
            positions=plan.positions,
            output_indices=plan.output_indices,
        )
    num_positions = plan.num_drafts + 1
    place = places(num_positions)
    return DrawPositions(
        rows=np.repeat(plan.rows, num_positions),
        place=place,
        positions=np.repeat(plan.positions, num_positions) + place,
        output_indices=np.repeat(plan.output_indices, num_positions) + place,
    )
