"""What one forward pass reads: token rows, their places in the KV cache, and which of them are sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headwater.engine_core.executor import Int32Array, StepPlan
from headwater.engine_core.sampling.verification import places, positions_of


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
    """int64 [S] token rows after which a token is sampled, now or by a draw: of each request its last ones, as many as
    it has drafts and one more."""

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
        sampled=torch.from_numpy(_last(plan.counts, num_sampled(plan))),
    )


def num_sampled(plan: StepPlan) -> Int32Array:
    """[R] positions of each row of a plan after which a token is sampled, now or by a draw."""
    return positions_of(plan.num_drafts, len(plan.rows)) * (plan.samples | plan.holds)


def last_tokens(batch: ForwardBatch, num_kept: Int32Array) -> ForwardBatch:
    """The last num_kept[r] tokens of each request, each as a request of one token; `sampled` names them in the batch
    that they are from."""
    at = torch.from_numpy(_last(batch.counts, num_kept)).to(batch.token_ids.device)
    first = batch.starts + batch.counts - num_kept
    return replace(
        batch,
        token_ids=batch.token_ids[at],
        positions=batch.positions[at],
        slots=batch.slots[at],
        starts=np.repeat(first, num_kept) + places(num_kept),
        counts=np.ones(len(at), np.int32),
        block_tables=batch.block_tables.repeat_interleave(torch.from_numpy(num_kept).to(at.device), dim=0),
        sampled=at,
    )


def _last(counts: Int32Array, num_kept: Int32Array) -> npt.NDArray[np.int64]:
    """Where the last num_kept[r] tokens of each request lie in a batch, int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    first: npt.NDArray[np.int64] = np.repeat(ends - num_kept, num_kept)
    return first + places(num_kept)
