"""More than one token for decode rows of a step: drafts.

Uses what the step leaves of the budget and of free blocks; knows nothing about waiting requests.
"""

from __future__ import annotations

import numpy as np

from .blocks.blocks import Blocks
from .rows.rows import Rows
from .step_builder import StepBuilder


def add_drafts(step: StepBuilder, rows: Rows, blocks: Blocks, max_positions: int) -> None:
    """Adds drafts of rows that decode, of the speculator or the executor, with the budget that is
    left and blocks that no other row can need."""
    table = rows.table
    if not table.drafts.is_on:
        return
    speculator = rows.speculator
    decoding = step.decode_rows
    runs_ahead = table.drafts.runs_ahead[decoding]
    is_ahead = bool(runs_ahead.any())
    may_draft = runs_ahead if is_ahead else table.drafts.needs_result[decoding]
    if not may_draft.any():
        return
    total = min(step.budget, max_positions - step.num_requests)
    num_left = table.compute_end[decoding] - table.num_computed[decoding]
    most = np.minimum(num_left, table.credit[decoding]) - 1
    most = np.minimum(most, min(speculator.max_drafts, total)) * may_draft
    room = blocks.room(decoding, table.num_computed) - 1
    if not blocks.may_grow(int(np.count_nonzero(most > room)), len(rows.running)):
        most = np.minimum(most, room)
    most = most.astype(np.int32)
    draft_ids = None
    if is_ahead:
        num_drafts = speculator.lengths(decoding, most, total)
    else:
        num_drafts, draft_ids = speculator.draft(table, decoding, most, total)
    if int(num_drafts.sum()) > total:
        before = np.cumsum(num_drafts) - num_drafts
        num_drafts = np.clip(total - before, 0, num_drafts).astype(np.int32)
    if num_all := int(num_drafts.sum()):
        step.grow(decoding[num_drafts > room], blocks)
        step.budget -= num_all
        step.num_drafts = num_drafts
        if draft_ids is not None:
            step.draft_ids = draft_ids[np.arange(draft_ids.shape[1]) < num_drafts[:, None]]
