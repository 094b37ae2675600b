"""The input words of a step on a GPU, sent in one copy with the step's changes of the request
table. Where only the device knows the positions of rows, a kernel corrects the words there. Knows
no other launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from headwater.kernels.launch.device import upload

from ...executor import Int32Array, StepPlan
from ..device.cuda_graphs import Graphs
from ..device.step_shapes import StepShape, StepShapes
from ..table.by_position import plan_by_position
from ..table.device_table import DeviceTable
from .device_rows import DeviceRows, knows_alone
from .result_memory import ResultMemory
from .step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step whose words the buffers hold."""

    plan: StepPlan
    by_position: StepPlan
    """The plan with each drafted token as a row."""
    shape: StepShape
    num_draws: int
    """Number of draws, padded; 0: the step draws nothing."""
    num_rows: int
    """Rows of `StepBuffers.steps`, padded; 0: the host knows where all rows are."""


class CudaEntry:
    """See `Entry`."""

    def __init__(
        self,
        table: DeviceTable,
        buffers: StepBuffers,
        shapes: StepShapes,
        rows: DeviceRows,
        results: ResultMemory,
        graphs: Graphs,
        *,
        sends_all_rows: bool,
    ) -> None:
        """`sends_all_rows`: the drafter reads the positions of rows in every step."""
        self._table = table
        self._buffers = buffers
        self._shapes = shapes
        self._rows = rows
        self._results = results
        self._graphs = graphs
        self._sends_all_rows = sends_all_rows

    def send(self, plan: StepPlan) -> SentStep:
        by_position = plan_by_position(plan)
        rows: Int32Array | None = None
        if self._sends_all_rows or knows_alone(plan):
            rows = self._rows.columns(plan, self._shapes.num_rows(len(plan.rows)))
        changes = self._table.changes(plan)
        shape, tiles = self._shapes.of(by_position)
        if self._table.has_adapters(plan):
            shape = replace(shape, has_adapters=True)
        count = int(by_position.samples.sum())
        num_draws = self._shapes.num_rows(count) if count else 0
        firsts = self._results.firsts(plan.step)
        sent = self._buffers.send(by_position, shape, tiles, num_draws, changes, firsts, rows)
        if changes.size:
            device = self._buffers.steps.device
            self._table.apply(upload(changes, device) if sent is None else sent)
        return SentStep(plan, by_position, shape, num_draws, 0 if rows is None else rows.shape[1])

    def take(self, sent: SentStep) -> StepShape:
        if sent.num_rows:
            self._graphs.run_once(
                (sent.shape, "rows", sent.num_rows),
                partial(self._rows.draft, sent.shape, sent.num_rows),
            )
        return sent.shape

    def rehearse(self) -> None:
        """Launches the kernels of `take` for each shape."""
        for shape in self._shapes.for_each_kernel():
            self._rows.draft(shape, 1)

    def clear(self, shape: StepShape) -> None:
        """A step of this shape that is all padding."""
        self._buffers.clear(shape, self._shapes.num_rows(shape.num_decodes or 1))

    def rows(self, num_rows: int) -> torch.Tensor:
        """The columns of rows that the buffers hold, int32 [5, num_rows]; see `draft_rows`."""
        return self._buffers.steps[:, :num_rows]
