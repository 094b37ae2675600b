"""Host memory through which the ranks of an engine exchange tensors where their GPUs do not reach
one another's memory.

Every rank of a host maps the whole memory and locks it for its own GPU. It has a piece for each
rank that divides layers with others (`peer_memory`), and behind these a piece for each rank of a
stage (`stage_memory`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from headwater.kernels.peer.peer_memory import (
    PeerError,
    PeerMemory,
    host_address,
    in_host_memory,
    memory_bytes,
    reaches,
    slot_bytes_of,
)
from headwater.kernels.stage.stage_memory import StageMemory, StageSizes, stages_in_host_memory

from ...options import ExecutorOptions
from ...platforms.peer_group import LEAST_SLOT
from ...system.ring import map_at_least
from ...weights.shards import ParallelLayout
from ..device.locked_memory import LockedMemory
from .rank_devices import local_devices

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSizes:
    """Sizes of the messages between ranks, the same on all of them."""

    layout: ParallelLayout
    row_bytes: int
    """Bytes of a row of the residual stream, in the model's dtype."""
    stages: StageSizes | None
    """Sizes of messages between stages; None: stages do not exchange here."""
    here: range
    """Stages of this host; all stages where all of them are on this host."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot. A row in flagged words, or in float32, takes twice its bytes. Rows are
        sent one by one, which is enough to saturate the bus."""
        return slot_bytes_of(max(2 * self.row_bytes, LEAST_SLOT))

    @property
    def peer_bytes(self) -> int:
        """Bytes of shared host memory of a rank that divides layers; 0 without such ranks."""
        divides = self.layout.tensor > 1
        return _aligned(memory_bytes(self.layout.tensor, self.slot_bytes)) if divides else 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of the piece of a stage."""
        return 0 if self.stages is None else _aligned(self.stages.num_bytes)

    @property
    def stage_offset(self) -> int:
        """Bytes from the beginning of the memory to the pieces of stages."""
        return len(self.here) * self.layout.tensor * self.peer_bytes

    @property
    def num_bytes(self) -> int:
        return self.stage_offset + len(self.here) * self.layout.tensor * self.stage_bytes


class HostExchange:
    """The shared host memory as one rank's GPU addresses it."""

    def __init__(self, memory: int, sizes: ExchangeSizes, rank: int) -> None:
        """`memory`: a descriptor that all ranks have; the first one to map it sets its size. Raises
        `RuntimeError` where the host refuses to lock it, and `OSError` where there is too little
        memory."""
        # All ranks of a host compute the same size: none of them truncates what another one has
        # mapped.
        pages = map_at_least(memory, sizes.num_bytes)
        self._locked = LockedMemory(torch.frombuffer(pages, dtype=torch.uint8))
        self._address = host_address(self._locked.memory.data_ptr())
        self._sizes = sizes
        layout = sizes.layout
        self._stage = layout.stage_index(rank)
        self._shard = layout.shard(rank).index

    def peers(self) -> PeerMemory:
        """The pieces of the ranks that divide this rank's layers."""
        sizes = self._sizes
        layout = self._sizes.layout
        first = (self._stage - sizes.here.start) * layout.tensor
        return in_host_memory(
            self._shard,
            self._address + first * sizes.peer_bytes,
            sizes.peer_bytes,
            layout.tensor,
            sizes.slot_bytes,
            sizes.row_bytes // 2,
            self._locked,
        )

    def stages(self) -> StageMemory:
        """Memory by which this rank exchanges hidden states with the ranks of other pipeline stages
        that have the same tensor-parallel index."""
        sizes = self._sizes
        assert sizes.stages is not None
        addresses = {stage: self._address + self._offset(stage) for stage in sizes.here}
        return stages_in_host_memory(
            self._stage, sizes.layout.pipeline, addresses, sizes.stages, self._locked
        )

    def _offset(self, stage: int) -> int:
        sizes = self._sizes
        number = stage * sizes.layout.tensor + self._shard
        return sizes.stage_offset + number * sizes.stage_bytes


def open_exchange(memory: int, sizes: ExchangeSizes, rank: int) -> HostExchange | None:
    """Maps a rank's exchange in host memory; None where the host does not give or lock so much."""
    try:
        return HostExchange(memory, sizes, rank)
    except (RuntimeError, PeerError, OSError):
        return None


def first_unreached(options: ExecutorOptions, own: int) -> int | None:
    """The first rank whose GPU memory this rank's GPU cannot reach; None if it reaches all. With
    stages on other hosts, only ranks of the same stage count."""
    here = options.ranks_beside(own)
    stage = options.layout.ranks_of(options.layout.stage_index(own))
    devices = local_devices(os.environ, own - here.start, len(here))
    asked = stage if options.stage_hosts else here
    return next((rank for rank in asked if not reaches(0, devices[rank - here.start])), None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
