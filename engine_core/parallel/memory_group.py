"""A group of tensor-parallel ranks that exchange tensors through memory that they share. See
`layers.process_group.Group`.

Every rank has a slot of the memory, twice: what it writes for one exchange stays there while others
read it, and the next exchange uses the other slot. A byte in a pipe says that a slot is written, so
that no rank polls, the byte orders the memory on any processor, and the death of a rank ends the
wait of the others. No order of additions depends on sizes: every rank adds the slots in the order
of the ranks, or in a tree where it is asked to.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

from headwater.kernels.gemm.tree_sum import tree_sum

from ..system.ring import PeerGone, anonymous_memory
from .rank_waits import RankWaits

SLOT_BYTES = 1 << 22
"""Longer tensors are exchanged in pieces."""


class GroupEnd(NamedTuple):
    """File descriptors of one rank, inherited by its process."""

    memory: int
    slot_bytes: int
    to_peers: list[int]
    """File descriptors to the other ranks, in their order."""
    from_peers: list[int]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.memory, *self.to_peers, *self.from_peers

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)


def create_group(size: int, slot_bytes: int = SLOT_BYTES) -> list[GroupEnd]:
    """The ends of a new group, one for each rank. Descriptors are inherited only where asked."""
    memory = anonymous_memory("headwater-group", 2 * size * slot_bytes)
    pipes = {(i, j): os.pipe() for i in range(size) for j in range(size) if i != j}
    ends = [
        GroupEnd(
            memory=os.dup(memory),
            slot_bytes=slot_bytes,
            to_peers=[pipes[rank, peer][1] for peer in range(size) if peer != rank],
            from_peers=[pipes[peer, rank][0] for peer in range(size) if peer != rank],
        )
        for rank in range(size)
    ]
    os.close(memory)
    return ends


class MemoryGroup:
    """See `Group`. Owns its descriptors."""

    def __init__(self, index: int, end: GroupEnd, waits: RankWaits | None = None) -> None:
        """`waits`: counters of this rank, to which the group adds its waits."""
        self.index = index
        self.size = len(end.to_peers) + 1
        self._waits = waits or RankWaits()
        self._end = end
        self._memory = mmap.mmap(end.memory, 2 * self.size * end.slot_bytes)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8).view(2, self.size, end.slot_bytes)
        self._slots = [list(half) for half in slots]
        self._half = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous().view(-1)
        out = torch.empty_like(flat)
        for at in range(0, len(flat), self._capacity(x)):
            piece = flat[at : at + self._capacity(x)]
            first, *others = self._exchange(piece)
            total = first.float() + others[0].float() if others else first.float()
            for other in others[1:]:
                total += other.float()
            out[at : at + len(piece)] = total
        return out.view(x.shape)

    def tree_sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tree_sum(self.join(x).chunk(self.size, dim=1)).to(dtype)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty(rows, self.size, width)
        for at in range(0, width, self._capacity(x)):
            columns = min(self._capacity(x), width - at)
            most = max(1, self._capacity(x) // columns)
            for first in range(0, rows, most):
                piece = x[first : first + most, at : at + columns]
                for rank, part in enumerate(self._exchange(piece.reshape(-1))):
                    out[first : first + most, rank, at : at + columns] = part.view(piece.shape)
        return out.flatten(1)

    def close(self) -> None:
        self._slots = []
        self._end.close()

    def _capacity(self, x: torch.Tensor) -> int:
        """Elements of a slot."""
        return self._end.slot_bytes // x.itemsize

    def _exchange(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of all ranks, in their order, views that stand until the exchange after the
        next."""
        slots = self._slots[self._half]
        self._half = 1 - self._half
        slots[self.index][: piece.nbytes].view(piece.dtype).copy_(piece)
        self._meet()
        return [slot[: piece.nbytes].view(piece.dtype) for slot in slots]

    def _meet(self) -> None:
        """Returns when every rank has written. Raises `PeerGone` when one of them is gone."""
        for fd in self._end.to_peers:
            try:
                os.write(fd, b"\0")
            except BrokenPipeError:
                raise PeerGone from None
        with self._waits.counted():
            for fd in self._end.from_peers:
                if not os.read(fd, 1):
                    raise PeerGone
