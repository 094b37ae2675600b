"""What one forward pass reads: token rows, their places in the KV cache, and which of them are sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headwater.engine_core.executor import BoolArray, Int32Array, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of R requests, requests one after another."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]: block id x block_size + offset in the block."""
    starts: Int32Array
    """[R] first position of each request."""
    counts: Int32Array
    """[R] positions of each request."""
    block_tables: torch.Tensor
    """int32 [R, blocks]; entries beyond a request's blocks name the scratch block 0."""
    sampled: torch.Tensor
    """int64 [S] token rows after which a token is sampled, now or by a draw."""

    def to(self, device: torch.device) -> ForwardBatch:
        """The same with its tensors on a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            block_tables=self.block_tables.to(device),
            sampled=self.sampled.to(device),
        )


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
        sampled=torch.from_numpy(ends[plan.samples | plan.holds] - 1),
    )


def last_tokens(batch: ForwardBatch, is_kept: BoolArray) -> ForwardBatch:
    """The last token of each request that is kept, bools [R], as requests of one token; `sampled` names them in the
    batch that they are from."""
    at = torch.from_numpy(np.cumsum(batch.counts)[is_kept] - 1).to(batch.token_ids.device)
    return replace(
        batch,
        token_ids=batch.token_ids[at],
        positions=batch.positions[at],
        slots=batch.slots[at],
        starts=(batch.starts + batch.counts - 1)[is_kept],
        counts=np.ones_like(batch.counts[is_kept]),
        block_tables=batch.block_tables[torch.from_numpy(is_kept).to(at.device)],
        sampled=at,
    )
