"""Log probabilities of prompts on a GPU, beside the steps that compute them."""

from __future__ import annotations

import numpy as np
import torch

from ...executor import AdmittedRow, StepPlan
from ..table.device_table import DeviceTable
from .device_head import DeviceHead
from .device_sampler import Scores, score

SCORED_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""


class CudaPromptScores:
    def __init__(self, head: DeviceHead, table: DeviceTable, num_rows: int) -> None:
        self._head = head
        self._table = table
        self._num_prompt, self._num_top = np.zeros((2, num_rows), np.int32)

    def admit(self, admitted: AdmittedRow) -> None:
        self._num_prompt[admitted.row] = admitted.num_prompt_tokens
        self._num_top[admitted.row] = admitted.sampling.num_prompt_logprobs or 0

    def score(self, plan: StepPlan, hidden: torch.Tensor, row: int) -> tuple[list[Scores], int]:
        """Launches what scores the prompt tokens of a table row that the plan computes, from its
        hidden states [T, H]. Returns the scores in parts, and how many of the likeliest tokens are
        wanted."""
        i = int(np.flatnonzero(plan.rows == row)[0])
        start = int(plan.starts[i])
        first = int(plan.counts[:i].sum())
        count = min(int(plan.counts[i]), int(self._num_prompt[row]) - 1 - start)
        # A copy: another request may have the row before the scores are read.
        next_ids = self._table.token_ids[row, start + 1 : start + 1 + count].clone()
        num_top = int(self._num_top[row])
        parts = []
        for at in range(0, count, SCORED_AT_ONCE):
            end = min(at + SCORED_AT_ONCE, count)
            parts.append(self._score(hidden[first + at : first + end], next_ids[at:end], num_top))
        return parts, num_top

    def _score(self, hidden: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
        logits, kind = self._head.scored(hidden, num_top)
        return score(logits, token_ids, num_top, kind.tokens)
