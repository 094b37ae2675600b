"""The request table of a GPU: token ids, block ids and sampling state as words that one kernel
updates a step."""

from __future__ import annotations

import numpy as np
import torch

from headwater.kernels.rows.step_rows import ADAPTER_WORD, PARAM_WORDS, scatter_words

from ...config import EngineConfig
from ...executor import NO_ADAPTER, AdmittedRow, Int32Array, StepPlan
from ...ragged import places


class DeviceTable:
    """The request table on a device. Its columns are views of one int32 tensor, so that a step's
    changes are one list of (index, value)."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        rows = config.num_rows
        columns = config.columns
        num_columns = columns.num_columns
        # A position more than a request has: a sampled token is written even when it is the last.
        self._token_stride = config.max_model_len + 1
        self._block_stride = num_columns
        sizes = [rows * self._token_stride, rows * num_columns, rows * PARAM_WORDS]
        self._words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tokens, blocks, params = torch.split(self._words, sizes)
        self._first_block = sizes[0]
        self._first_param = sizes[0] + sizes[1]
        self.token_ids = tokens.view(rows, -1)
        self.block_ids = blocks.view(rows, -1)
        self.kv_pages = self.block_ids[:, : columns.first_place]
        """Block tables of all page groups, concatenated."""
        self.block_tables = torch.split(self.kv_pages, columns.max_blocks, dim=1)
        """Block tables [rows, max blocks] of each page group."""
        self.params = params.view(rows, -1)
        self._adapters: Int32Array = np.full(rows, NO_ADAPTER, np.int32)
        # Number of known tokens of each row, where only the device knows it: see `draft_rows`.
        self.known = torch.zeros(rows, dtype=torch.int32, device=device)
        # An update without effect, so that no step compiles it.
        self.apply(torch.zeros(2, 1, dtype=torch.int32, device=device))

    def changes(self, plan: StepPlan) -> Int32Array:
        """Words that a plan changes, and their new values: [2, U]."""
        indices: list[Int32Array] = []
        values: list[Int32Array] = []
        for admitted in plan.admitted:
            self._adapters[admitted.row] = admitted.adapter
            first = admitted.row * self._token_stride
            indices.append(np.arange(first, first + len(admitted.token_ids), dtype=np.int32))
            values.append(admitted.token_ids)
            first = self._first_param + admitted.row * PARAM_WORDS
            indices.append(np.arange(first, first + PARAM_WORDS, dtype=np.int32))
            values.append(_param_words(admitted))
        if plan.block_rows.size:
            indices.append(
                self._first_block + plan.block_rows * self._block_stride + plan.block_indices
            )
            values.append(plan.block_ids)
        if plan.num_drafts is not None and plan.draft_ids is not None:
            first_drafts = (
                plan.rows * self._token_stride + plan.starts + plan.counts - plan.num_drafts
            )
            indices.append(np.repeat(first_drafts, plan.num_drafts) + places(plan.num_drafts))
            values.append(plan.draft_ids)
        if not indices:
            return NO_CHANGES
        changes = np.empty((2, sum(map(len, indices))), np.int32)
        np.concatenate(indices, out=changes[0])
        np.concatenate(values, out=changes[1])
        return changes

    def has_adapters(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has an adapter."""
        return bool((self._adapters[plan.rows] != NO_ADAPTER).any())

    def apply(self, changes: torch.Tensor) -> None:
        """int32 [2, U] on the device."""
        scatter_words(self._words, changes[0], changes[1])


NO_CHANGES: Int32Array = np.empty((2, 0), np.int32)


def _param_words(admitted: AdmittedRow) -> Int32Array:
    params = admitted.sampling
    words = np.zeros(PARAM_WORDS, np.int32)
    words[:2] = np.array([params.seed], np.int64).view(np.int32)
    words[2] = admitted.choice_index
    words[ADAPTER_WORD] = admitted.adapter
    words[4] = max(params.top_k, 0)
    words[[3, 5, 6]] = np.array(
        [0.0 if params.is_greedy else params.temperature, params.top_p, params.min_p], np.float32
    ).view(np.int32)
    return words
