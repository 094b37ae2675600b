"""The forward pass of a plan: which tokens it reads, and where their keys and values go."""

from __future__ import annotations

import numpy as np
import torch

from ...executor import Int32Array, StepPlan
from ...layers.batch import ForwardBatch
from ...ragged import last_elements
from ...sampling.verification import positions_of


def make_batch(
    plan: StepPlan, token_table: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> ForwardBatch:
    """token_table int32 [rows, max_model_len] and block_table int32 [rows, max blocks] are the
    request table's."""
    return ragged_batch(
        plan.rows, plan.starts, plan.counts, num_sampled(plan), token_table, block_table, block_size
    )


def ragged_batch(
    table_rows: Int32Array,
    starts: Int32Array,
    counts: Int32Array,
    num_wanted: Int32Array,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> ForwardBatch:
    """Positions starts[i] … starts[i] + counts[i] − 1 of table_rows[i], of which the last
    num_wanted[i] are sampled."""
    ends = np.cumsum(counts)
    token_rows = np.repeat(table_rows, counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
    num_blocks = int((starts + counts - 1).max()) // block_size + 1
    # An operation of numpy on a few numbers takes a fifth of the time of torch's.
    token_ids = token_table.numpy()
    block_ids = block_table.numpy()
    blocks = block_ids[token_rows, positions // block_size].astype(np.int64)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * block_size + positions % block_size),
        starts=starts,
        counts=counts,
        block_tables=torch.from_numpy(block_ids[table_rows, :num_blocks]),
        sampled=torch.from_numpy(last_elements(counts, num_wanted)),
    )


def num_sampled(plan: StepPlan) -> Int32Array:
    """[R] positions of each row of a plan after which a token is sampled, now or by a draw."""
    return positions_of(plan.num_drafts, len(plan.rows)) * (plan.samples | plan.holds)
