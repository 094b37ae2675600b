"""Host memory through which the ranks of an engine exchange tensors where their GPUs do not reach one another's memory.

Every rank maps the whole memory and locks it for its own GPU. It has a piece for each rank: that of the ranks which
divide layers (`peer_memory`), and behind it that of the stages (`stage_memory`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headwater.kernels.peer_memory import (
    PeerError,
    PeerMemory,
    host_address,
    in_host_memory,
    memory_bytes,
    reaches,
    slot_bytes_of,
)
from headwater.kernels.stage_memory import StageMemory, StageSizes, stages_in_host_memory

from ..platforms.peer_group import LEAST_SLOT
from ..ring import map_at_least
from ..shards import ParallelLayout
from .locked_memory import LockedMemory
from .rank_devices import local_devices

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes:
    """Sizes of the messages between ranks, the same on all of them."""

    layout: ParallelLayout
    row_bytes: int
    """Bytes of a row of the residual stream, in the model's dtype."""
    stages: StageSizes | None
    """None: there is one stage."""

    @property
    def slot_bytes(self) -> int:
        """A row in flagged words, or in float32, takes twice its bytes. Rows go one by one: the bus is full of them."""
        return slot_bytes_of(max(2 * self.row_bytes, LEAST_SLOT))

    @property
    def stage_offset(self) -> int:
        """Bytes from the beginning of a rank's piece to what its stage has there."""
        return _aligned(memory_bytes(self.layout.tensor, self.slot_bytes)) if self.layout.tensor > 1 else 0

    @property
    def piece_bytes(self) -> int:
        return self.stage_offset + (0 if self.stages is None else _aligned(self.stages.num_bytes))

    @property
    def num_bytes(self) -> int:
        return self.piece_bytes * self.layout.num_ranks


class HostExchange:
    """The memory as the GPU of one rank reaches it."""

    def __init__(self, memory: int, sizes: ExchangeSizes, rank: int) -> None:
        """`memory`: a descriptor that all ranks have; the first one to map it sets its size. Raises `RuntimeError`
        where the host does not let it be locked, and `OSError` where it has not so much."""
        # All ranks find the same size: none of them shortens what another one has mapped.
        pages = map_at_least(memory, sizes.num_bytes)
        self._locked = LockedMemory(torch.frombuffer(pages, dtype=torch.uint8))
        self._address = host_address(self._locked.memory.data_ptr())
        self._sizes, layout = sizes, sizes.layout
        self._stage, self._shard = layout.stage_index(rank), layout.shard(rank).index

    def peers(self) -> PeerMemory:
        """The pieces of the ranks that divide this rank's layers."""
        sizes, layout = self._sizes, self._sizes.layout
        return in_host_memory(
            self._shard,
            self._piece(self._stage * layout.tensor),
            sizes.piece_bytes,
            layout.tensor,
            sizes.slot_bytes,
            sizes.row_bytes // 2,
            self._locked,
        )

    def stages(self) -> StageMemory:
        """The pieces of all stages, of the ranks that have the same share of their layers."""
        sizes, layout = self._sizes, self._sizes.layout
        assert sizes.stages is not None
        addresses = [
            self._piece(stage * layout.tensor + self._shard) + sizes.stage_offset for stage in range(layout.pipeline)
        ]
        return stages_in_host_memory(self._stage, addresses, sizes.stages, self._locked)

    def _piece(self, rank: int) -> int:
        return self._address + rank * self._sizes.piece_bytes


def open_exchange(memory: int, sizes: ExchangeSizes, rank: int) -> HostExchange | None:
    """None where the host does not give or lock so much memory."""
    try:
        return HostExchange(memory, sizes, rank)
    except (RuntimeError, PeerError, OSError):
        return None


def first_unreached(layout: ParallelLayout, own: int) -> int | None:
    """The first rank whose GPU's memory this rank's GPU does not reach; None: it reaches all of them."""
    devices = local_devices(os.environ, own, layout.num_ranks)
    return next((rank for rank, device in enumerate(devices) if not reaches(0, device)), None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
