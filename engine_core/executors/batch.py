"""The forward pass of a plan: which tokens it reads, and where their keys and values go."""

from __future__ import annotations

import numpy as np
import torch

from headwater.engine_core.executor import Int32Array, StepPlan
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.ragged import last_elements
from headwater.engine_core.sampling.verification import positions_of


def make_batch(plan: StepPlan, token_table: torch.Tensor, block_table: torch.Tensor, block_size: int) -> ForwardBatch:
    """token_table int32 [rows, max_model_len] and block_table int32 [rows, max blocks] are the request table's."""
    ends = np.cumsum(plan.counts)
    token_rows = np.repeat(plan.rows, plan.counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - plan.counts, plan.counts) + np.repeat(plan.starts, plan.counts)
    rows, at = torch.from_numpy(token_rows).long(), torch.from_numpy(positions)
    num_blocks = int((plan.starts + plan.counts - 1).max()) // block_size + 1
    return ForwardBatch(
        token_ids=token_table[rows, at].long(),
        positions=at,
        slots=block_table[rows, at // block_size].long() * block_size + at % block_size,
        starts=plan.starts,
        counts=plan.counts,
        block_tables=block_table[torch.from_numpy(plan.rows).long(), :num_blocks],
        sampled=torch.from_numpy(last_elements(plan.counts, num_sampled(plan))),
    )


def num_sampled(plan: StepPlan) -> Int32Array:
    """[R] positions of each row of a plan after which a token is sampled, now or by a draw."""
    return positions_of(plan.num_drafts, len(plan.rows)) * (plan.samples | plan.holds)
