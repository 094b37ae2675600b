"""Ranks of one machine with a GPU each, which exchange tensors through the memory of all their
GPUs. Launches only, so graphs can capture them."""

from __future__ import annotations

import torch

from headwater.kernels.peer.peer_join import peer_join
from headwater.kernels.peer.peer_memory import OwnMemory, PeerMemory, slot_bytes_of
from headwater.kernels.peer.peer_sum import (
    GROUP_ROWS,
    peer_sum,
    peer_sum_add_rms_norm,
    peer_tree_sum,
)
from headwater.kernels.sampling.peer_best import peer_best
from headwater.kernels.sampling.sample import Candidates
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice

from ..layers.process_group import Group

LEAST_SLOT = 16 << 10
"""Bytes that logits are joined by, at least."""


class PeerGroup:
    """See `Group`."""

    def __init__(self, memory: PeerMemory) -> None:
        self.index = memory.index
        self.size = memory.size
        self._memory = memory

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return peer_sum(self._memory, x)

    def tree_sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return peer_tree_sum(self._memory, x, dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return peer_join(self._memory, x)

    def sum_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        dependent: bool,
    ) -> torch.Tensor:
        """residual += the sum of the ranks' x, in place; the norm of that."""
        return peer_sum_add_rms_norm(self._memory, x, residual, weight, eps, dependent=dependent)

    def best(self, candidates: Candidates, num_stretches: int, out: torch.Tensor) -> None:
        """Writes the ids of the best candidates of all ranks to out int32 [R]."""
        peer_best(self._memory, candidates, num_stretches, out)

    def slice_of(self, first_token: int, vocab_size: int) -> VocabularySlice:
        """This rank's slice of the vocabulary, from `first_token` on, for kernels that draw and
        score together with the other ranks'."""
        return VocabularySlice(memory=self._memory, first_token=first_token, vocab_size=vocab_size)


def open_peer_group(host: Group, row_bytes: int) -> PeerGroup:
    """Opens the group of the ranks of `host` over newly allocated memory, which all of their GPUs
    map. `row_bytes`: bytes of the longest row that is summed. Raises `PeerError`."""
    own = OwnMemory(host.size, slot_bytes_of(max(GROUP_ROWS * row_bytes, LEAST_SLOT)))
    handle = own.handle()
    joined = host.join(torch.frombuffer(bytearray(handle), dtype=torch.uint8)[None])
    handles = [bytes(each) for each in joined.view(host.size, -1).tolist()]
    group = PeerGroup(own.beside(host.index, handles, flagged_len=row_bytes // 2))
    # No rank may write into memory that another rank has not mapped, or not zeroed, yet.
    host.join(torch.zeros(1, 1, dtype=torch.uint8))
    return group
