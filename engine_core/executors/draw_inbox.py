"""What a draw under masks tells the GPU: a few staged words, and masks as they lie in the table of whoever fills it."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda import check_error, cudart

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan, Int32Array
from headwater.engine_core.executors.step_shapes import aligned

_HEAD = 4
"""Words before the rows; the first says where results go."""
_MOST_GAPS = 4
"""Rows of the table that are copied for one that is drawn: one copy of a stretch takes less than one of each row."""


class DrawInbox:
    """One buffer on the device, and a pinned one for each draw in flight."""

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device) -> None:
        stride, self._is_gpu = aligned(config.max_num_seqs), device.type == "cuda"
        self._words = torch.zeros(_HEAD + 4 * stride, dtype=torch.int32, device=device)
        self._pinned = [
            torch.zeros(len(self._words), dtype=torch.int32, pin_memory=self._is_gpu)
            for _ in range(2 * config.async_depth + 1)
        ]
        self._staged: list[Int32Array] = [each.numpy() for each in self._pinned]
        self.first_result = self._words[:1]
        # A row of each: table rows or -1, positions before the token, output indices, and where masks and logits lie.
        self._draws = self._words[_HEAD:].view(4, -1)
        self._masks = torch.full((config.max_num_seqs, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._table: tuple[Int32Array, torch.Tensor] | None = None
        """Which is read, and how torch sees it."""

    def send(self, plan: DrawPlan, num_draws: int, first_result: int) -> None:
        """Copies a draw to the device, padded to `num_draws`."""
        turn, count = plan.step % len(self._staged), len(plan.rows)
        staged = self._staged[turn]
        staged[0] = first_result
        draws = staged[_HEAD:].reshape(4, -1)
        draws[:, count:num_draws] = [[-1], [0], [0], [0]]
        draws[:, :count] = plan.rows, plan.positions - 1, plan.output_indices, plan.rows
        self._words.copy_(self._pinned[turn], non_blocking=True)
        self._copy_masks(plan)

    def clear(self, num_draws: int) -> None:
        """A draw that is all padding."""
        self._words.zero_()
        self._draws[0, :num_draws].fill_(-1)

    def draws(self, num_draws: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Table rows, positions and output indices, int32 [S] each."""
        rows, positions, outputs, _ = self._draws[:, :num_draws].unbind()
        return rows, positions, outputs

    def masks(self, num_draws: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks [S, words], and the table rows that they are of, int64 [S]: those of padding are any."""
        at = self._draws[3, :num_draws].long()
        return self._masks[at], at

    def close(self) -> None:
        """Lets go of the table. Nothing may be in flight."""
        if self._table is not None and self._is_gpu:
            check_error(_runtime().cudaHostUnregister(self._table[1].data_ptr()))
        self._table = None

    def _source(self, table: Int32Array) -> torch.Tensor:
        """The table, pinned: the device reads it where it is, beside what runs here."""
        if self._table is None or self._table[0] is not table:
            self.close()
            source = torch.from_numpy(table)
            if self._is_gpu:
                check_error(_runtime().cudaHostRegister(source.data_ptr(), table.nbytes, 0))
            self._table = table, source
        return self._table[1]

    def _copy_masks(self, plan: DrawPlan) -> None:
        source = self._source(plan.masks)
        first, end = int(plan.rows.min()), int(plan.rows.max()) + 1
        if end - first <= _MOST_GAPS * len(plan.rows):
            self._masks[first:end].copy_(source[first:end, 0], non_blocking=True)
        else:
            for row in plan.rows.tolist():
                self._masks[row].copy_(source[row, 0], non_blocking=True)


def _runtime() -> Any:
    return cudart()  # type: ignore[no-untyped-call]  # torch ships it so
