"""The forward pass of a plan: which tokens it reads, and where their keys and values go."""

from __future__ import annotations

import numpy as np
import torch

from ..executor import Int32Array, StepPlan
from ..layers.batch import ForwardBatch
from ..ragged import last_elements
from ..sampling.verification import positions_of


def make_batch(plan: StepPlan, token_table: torch.Tensor, block_table: torch.Tensor, block_size: int) -> ForwardBatch:
    """token_table int32 [rows, max_model_len] and block_table int32 [rows, max blocks] are the request table's."""
    return ragged_batch(plan.rows, plan.starts, plan.counts, num_sampled(plan), token_table, block_table, block_size)


def ragged_batch(
    table_rows: Int32Array,
    starts: Int32Array,
    counts: Int32Array,
    num_wanted: Int32Array,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> ForwardBatch:
    """Positions starts[i] … starts[i] + counts[i] − 1 of table_rows[i], of which the last num_wanted[i] are sampled."""
    ends = np.cumsum(counts)
    token_rows = np.repeat(table_rows, counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
    rows, at = torch.from_numpy(token_rows).long(), torch.from_numpy(positions)
    num_blocks = int((starts + counts - 1).max()) // block_size + 1
    return ForwardBatch(
        token_ids=token_table[rows, at].long(),
        positions=at,
        slots=block_table[rows, at // block_size].long() * block_size + at % block_size,
        starts=starts,
        counts=counts,
        block_tables=block_table[torch.from_numpy(table_rows).long(), :num_blocks],
        sampled=torch.from_numpy(last_elements(counts, num_wanted)),
    )


def num_sampled(plan: StepPlan) -> Int32Array:
    """[R] positions of each row of a plan after which a token is sampled, now or by a draw."""
    return positions_of(plan.num_drafts, len(plan.rows)) * (plan.samples | plan.holds)
