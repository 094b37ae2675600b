"""Tells a GPU a step, and what it changes in the request table. Knows no launches but these."""

from __future__ import annotations

import torch

from headwater.kernels.launch.device import upload

from ...executor import Int32Array, StepPlan
from ..device.step_shapes import StepShape, StepShapes
from ..table.device_table import DeviceTable
from .step_buffers import StepBuffers


class StepSender:
    def __init__(
        self, table: DeviceTable, buffers: StepBuffers, shapes: StepShapes, device: torch.device
    ) -> None:
        self._table = table
        self._buffers = buffers
        self._shapes = shapes
        self._device = device

    def send(
        self,
        whole: StepPlan,
        plan: StepPlan,
        own: Int32Array | None,
        first_results: tuple[int, int] = (0, 0),
    ) -> tuple[StepShape, int]:
        """`plan`: the whole one with its drafts spread; `own` and `first_results`: see
        `StepBuffers.send`. Returns the step's shape and its number of draws, padded; 0: it draws
        nothing."""
        changes = self._table.changes(whole)
        shape, tiles = self._shapes.of(plan)
        count = int(plan.samples.sum())
        num_draws = self._shapes.num_rows(count) if count else 0
        sent = self._buffers.send(plan, shape, tiles, num_draws, changes, first_results, own)
        if changes.size:
            self._table.apply(upload(changes, self._device) if sent is None else sent)
        return shape, num_draws
