"""State sets of a step's requests, by the block table in host memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headwater.kernels.blocks.clear_begun import clear_begun_twin
from headwater.kernels.states.set_layout import SetLayout

from ...config import EngineConfig
from ...executor import Int32Array, StepPlan
from ...layers.state_rows import StateRows
from ...table_columns import TableColumns
from ..table.eager_table import EagerTable


class StepStates(Protocol):
    """State sets of a model's steps."""

    def clear(self, plan: StepPlan) -> None:
        """Clears KV blocks that the step begins, before the drafter reads them."""

    def of_step(self, plan: StepPlan) -> StateRows | None:
        """State sets of the plan's rows; None: the model has no state layers."""


class NoStates:
    """See `StepStates`: the model has no state layers."""

    def clear(self, plan: StepPlan) -> None:
        pass

    def of_step(self, plan: StepPlan) -> None:
        pass


class EagerStates:
    """See `StepStates`."""

    def __init__(
        self, table: EagerTable, config: EngineConfig, layout: SetLayout, memory: torch.Tensor
    ) -> None:
        """memory uint8 [num_blocks, bytes of a block]: that of KV blocks and states."""
        self._block_ids = table.block_ids
        self._columns = config.columns
        self._block_size = config.block_size
        self._layout = layout
        self._memory = memory

    def of_step(self, plan: StepPlan) -> StateRows:
        table = self._block_ids.numpy()
        return state_rows(plan, table, self._columns, self._block_size, self._layout)

    def clear(self, plan: StepPlan) -> None:
        clear_begun_twin(
            self._memory,
            torch.from_numpy(plan.rows),
            torch.from_numpy(plan.starts),
            torch.from_numpy(plan.starts + plan.counts),
            self._block_ids[:, : self._columns.first_place],
            self._columns.max_blocks,
            self._block_size,
        )


def state_rows(
    plan: StepPlan,
    block_table: Int32Array,
    columns: TableColumns,
    block_size: int,
    layout: SetLayout,
) -> StateRows:
    """block_table [rows, columns] is the request table's; the plan says where its rows are."""
    ends = plan.starts + plan.counts

    def pages_of(positions: Int32Array) -> torch.Tensor:
        """int32 [R, P] pages of the sets of these positions' blocks."""
        places = block_table[plan.rows, columns.first_place + positions // block_size]
        first = columns.first_page + places * columns.state_pages
        of_set = first[:, None] + np.arange(columns.state_pages)
        return torch.from_numpy(block_table[plan.rows[:, None], of_set])

    is_decode = plan.counts == 1
    return StateRows(
        first=pages_of(plan.starts),
        last=pages_of(ends),
        starts=torch.from_numpy(plan.starts.astype(np.int32)),
        ends=torch.from_numpy(ends.astype(np.int32)),
        tokens=torch.from_numpy((np.cumsum(plan.counts) - plan.counts).astype(np.int32)),
        num_decodes=int(is_decode.argmin()) if not is_decode.all() else len(is_decode),
        layout=layout,
    )
