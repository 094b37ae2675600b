"""The forward pass of a plan: which tokens it reads, and where their keys and values go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...executor import Int32Array, StepPlan
from ...layers.batch import ForwardBatch
from ...ragged import last_elements
from ...sampling.verification import positions_of


def make_batch(
    plan: StepPlan,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    group_of_layer: tuple[int, ...] = (),
) -> ForwardBatch:
    """token_table int32 [rows, max_model_len] and block_table int32 [rows, page groups × max
    blocks] are the request table's, without columns of states. `group_of_layer`: page group of each
    layer; empty: there is one."""
    return ragged_batch(
        plan.rows,
        plan.starts,
        plan.counts,
        num_sampled(plan),
        token_table,
        block_table,
        block_size,
        group_of_layer,
    )


def ragged_batch(
    table_rows: Int32Array,
    starts: Int32Array,
    counts: Int32Array,
    num_wanted: Int32Array,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    group_of_layer: tuple[int, ...] = (),
) -> ForwardBatch:
    """Positions starts[i] … starts[i] + counts[i] − 1 of table_rows[i], of which the last
    num_wanted[i] are sampled. See `make_batch`."""
    ends = np.cumsum(counts)
    token_rows = np.repeat(table_rows, counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
    num_blocks = int((starts + counts - 1).max()) // block_size + 1
    idx = positions // block_size
    offsets = positions % block_size
    # An operation of numpy on a few numbers takes a fifth of the time of torch's.
    token_ids = token_table.numpy()
    block_ids = block_table.numpy()

    def paged(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and block tables of the page group whose columns begin at `first`."""
        blocks = block_ids[token_rows, first + idx].astype(np.int64)
        tables = block_ids[table_rows, first : first + num_blocks]
        return torch.from_numpy(blocks * block_size + offsets), torch.from_numpy(tables)

    slots, block_tables = paged(0)
    batch = ForwardBatch(
        token_ids=torch.from_numpy(token_ids[token_rows, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=slots,
        starts=starts,
        counts=counts,
        block_tables=block_tables,
        sampled=torch.from_numpy(last_elements(counts, num_wanted)),
    )
    if not group_of_layer:
        return batch
    max_blocks = block_ids.shape[1] // (max(group_of_layer) + 1)
    groups = [batch]
    for first in range(max_blocks, block_ids.shape[1], max_blocks):
        slots, block_tables = paged(first)
        groups.append(replace(batch, slots=slots, block_tables=block_tables))
    return replace(batch, page_groups=tuple(groups), group_of_layer=group_of_layer)


def num_sampled(plan: StepPlan) -> Int32Array:
    """[R] positions of each row of a plan after which a token is sampled, now or by a draw."""
    return positions_of(plan.num_drafts, len(plan.rows)) * (plan.samples | plan.holds)
