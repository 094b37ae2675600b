"""The request table in host memory: tokens and blocks of each row, and how many tokens are
known."""

from __future__ import annotations

import numpy as np
import torch

from ...config import EngineConfig
from ...executor import NO_ADAPTER, AdmittedRow, Int32Array, StepPlan
from ...ragged import places


class EagerTable:
    def __init__(self, config: EngineConfig) -> None:
        num_rows = config.num_rows
        # One position more than a request has: a sampled token is written even when it is the last.
        self.token_ids = torch.zeros(num_rows, config.max_model_len + 1, dtype=torch.int32)
        self.block_ids = torch.zeros(num_rows, config.columns.num_columns, dtype=torch.int32)
        self.num_prompt: Int32Array = np.zeros(num_rows, np.int32)
        self.adapters: Int32Array = np.full(num_rows, NO_ADAPTER, np.int32)
        """Slot of each row's adapter."""
        self.num_known: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of each row, sampled ones included."""

    def apply(self, plan: StepPlan) -> None:
        """Changes the table as the plan says."""
        for admitted in plan.admitted:
            self._admit(admitted)
        self.block_ids.numpy()[plan.block_rows, plan.block_indices] = plan.block_ids
        if plan.num_drafts is not None and plan.draft_ids is not None:
            count = plan.num_drafts
            ends = plan.starts + plan.counts
            rows = np.repeat(plan.rows, count)
            at = np.repeat(ends - count, count) + places(count)
            self.token_ids.numpy()[rows, at] = plan.draft_ids

    def outputs(self, row: int, length: int) -> Int32Array:
        """Output tokens of a row among its first `length` tokens."""
        token_ids: Int32Array = self.token_ids[row, self.num_prompt[row] : length].numpy()
        return token_ids

    def adapters_of(self, plan: StepPlan) -> torch.Tensor | None:
        """int32 [T] slot of the adapter of each token of a plan; None: no token has one."""
        of_rows = self.adapters[plan.rows]
        if (of_rows == NO_ADAPTER).all():
            return None
        return torch.from_numpy(np.repeat(of_rows, plan.counts))

    def _admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        known = len(admitted.token_ids)
        self.token_ids[row, :known] = torch.from_numpy(admitted.token_ids)
        self.block_ids[row] = 0
        self.num_prompt[row] = admitted.num_prompt_tokens
        self.num_known[row] = known
        self.adapters[row] = admitted.adapter
