"""Input of one forward pass: token rows, their slots in the KV cache, and the sampled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..executor import Int32Array
from ..ragged import last_elements, places
from .state_rows import StateRows

LayerCaches = torch.Tensor | tuple[torch.Tensor, ...]
"""The KV cache of each layer, [2, num_blocks, Hk, block_size, D], or latents [num_blocks,
block_size, D]: one tensor of all layers, or one for each where pages are of several groups. Of a
state layer the memory of all pages, uint8 [pages, bytes of a page]; see `StateRows`."""


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
    """int64 [S] token rows after which a token is sampled, now or later by a draw: the last ones of
    each request, one more than it has drafts."""
    adapter_of_row: torch.Tensor | None = None
    """int32 [T] slot of each token's adapter, -1: none; None: no token has one."""
    states: StateRows | None = None
    """State sets of the requests; None: the model has no state layers."""
    page_groups: tuple[ForwardBatch, ...] = ()
    """The batch as layers of each page group read it, with slots and block tables of the group;
    empty: all layers read this one."""
    group_of_layer: tuple[int, ...] = ()
    """Page group of each layer, where there are several."""

    def of_layer(self, layer: int) -> ForwardBatch:
        """The batch as a layer reads it."""
        return self.page_groups[self.group_of_layer[layer]] if self.page_groups else self

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
            page_groups=tuple(each.to(device) for each in self.page_groups),
            adapter_of_row=None if self.adapter_of_row is None else self.adapter_of_row.to(device),
            states=None if self.states is None else self.states.to(device),
        )


def last_tokens(batch: ForwardBatch, num_kept: Int32Array) -> ForwardBatch:
    """The last num_kept[r] tokens of each request, from the batch of one page group, each as a
    request of one token; `sampled` has their indices in that batch."""
    at = torch.from_numpy(last_elements(batch.counts, num_kept)).to(batch.token_ids.device)
    first = batch.starts + batch.counts - num_kept
    return replace(
        batch,
        token_ids=batch.token_ids[at],
        positions=batch.positions[at],
        slots=batch.slots[at],
        starts=np.repeat(first, num_kept) + places(num_kept),
        counts=np.ones(len(at), np.int32),
        block_tables=batch.block_tables.repeat_interleave(
            torch.from_numpy(num_kept).to(at.device), dim=0
        ),
        sampled=at,
        states=None,
        page_groups=(),
        group_of_layer=(),
    )
