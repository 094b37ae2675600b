"""Memory through which pipeline stages on several GPUs reach one another: a stage writes its
residual stream into that of the next one, and the last stage the sampled tokens into those of the
others.

Each stage allocates one piece with cudaMalloc's allocator and maps those that it writes to by their
CUDA IPC handles. Where GPUs do not reach one another's memory, the pieces lie in host memory that
all stages have mapped; a count is stored then by the one stage that counts it, without atomic
operations.

A piece begins with four counts for each lane, a block of a launch: streams that have arrived, and
those that the next stage has taken (which other stages add to); streams that were sent and received
(this stage's own). Then come two slots for streams, which take turns, and slots for messages of
tokens. Counts are kept in the memory, so that a graph which is replayed goes on where the last
launch ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from ..peer.peer_memory import HOST_POLLS, MAX_POLLS, call_driver, open_address

NUM_LANES = tl.constexpr(128)
"""Row r of a stream is always lane r % NUM_LANES's, so that streams of any length may follow one
another."""
ARRIVED, TAKEN, SENT, RECEIVED = (tl.constexpr(i) for i in range(4))
"""Rows of the header, of a word for each lane."""
HEADER = tl.constexpr(4 * 4 * 128)
"""Bytes before the slots."""
NUM_SLOTS = tl.constexpr(2)
"""Streams that may be on their way: one is read while the next one is written."""
LAST_TOKENS = 32
"""Number of tokens before the end of a row that a message may have: as many as a step with drafts
can add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Sizes that a stage's piece of memory has room for."""

    stream_bytes: int
    """Bytes of a slot for a stream."""
    most_rows: int
    """Largest number of rows of a message of tokens."""
    most_positions: int
    """Largest number of positions of such a message."""
    num_messages: int
    """Slots for messages."""

    @property
    def message_len(self) -> int:
        """int32 words of a message; the first one is its number."""
        return 1 + max((2 + LAST_TOKENS) * self.most_rows, 3 * self.most_positions)

    @property
    def first_message(self) -> int:
        """Bytes from the beginning of a piece to its slots for messages."""
        return int(HEADER.value + NUM_SLOTS.value * self.stream_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of a piece."""
        return _aligned(self.first_message + 4 * self.num_messages * self.message_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The memory of this stage and of those that it writes to."""

    own: int
    """Address of this stage's piece; as the next ones."""
    before: int
    """0: this is the first stage."""
    behind: int
    """0: this is the last stage."""
    others: torch.Tensor
    """int64 [N]: of the first and the last stage, the addresses of all other pieces, in their
    order; else empty."""
    sizes: StageSizes
    host: object | None = None
    """Owner of the mapped host memory in which the pieces lie; None: they lie on GPUs."""
    max_polls: int = MAX_POLLS

    @property
    def is_host(self) -> bool:
        return self.host is not None

    def message_at(self, number: int) -> int:
        """Bytes from the beginning of a piece to the slot of that message."""
        return (
            self.sizes.first_message + number % self.sizes.num_messages * 4 * self.sizes.message_len
        )


def _aligned(num_bytes: int) -> int:
    """Rounds up to 128 bytes, as a slot for streams is."""
    return -(-num_bytes // 128) * 128


def allocate_piece(num_bytes: int) -> int:
    """Address of a piece on the current GPU, zeroed. It lasts until the process ends: others have
    it mapped. Raises `PeerError`."""
    # The driver's calls need the context that torch makes with its first tensor.
    torch.cuda.synchronize()
    address = ctypes.c_uint64()
    call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    call_driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
    torch.cuda.synchronize()
    return address.value


def beside(own: int, index: int, handles: Sequence[bytes], sizes: StageSizes) -> StageMemory:
    """Maps what stage `index` writes to, by the handles of the pieces of all stages in their order.
    Raises `PeerError`."""
    last = len(handles) - 1
    addresses = {
        stage: open_address(handles[stage])
        for stage in range(len(handles))
        if stage != index and (index in (0, last) or stage in (0, index - 1, index + 1))
    }
    return _stage_memory(index, last, addresses | {index: own}, sizes)


def stages_in_host_memory(
    index: int, num_stages: int, addresses: Mapping[int, int], sizes: StageSizes, host: object
) -> StageMemory:
    """The pieces of stages, by their numbers, where this GPU has them in host memory that `host`
    keeps mapped."""
    return _stage_memory(index, num_stages - 1, addresses, sizes, host, HOST_POLLS)


def _stage_memory(
    index: int,
    last: int,
    addresses: Mapping[int, int],
    sizes: StageSizes,
    host: object | None = None,
    max_polls: int = MAX_POLLS,
) -> StageMemory:
    others = (
        [addresses[stage] for stage in sorted(addresses) if stage != index]
        if index in (0, last)
        else []
    )
    return StageMemory(
        own=addresses[index],
        before=addresses.get(index - 1, 0),
        behind=addresses.get(index + 1, 0),
        others=torch.tensor(others, dtype=torch.int64, device="cuda"),
        sizes=sizes,
        host=host,
        max_polls=max_polls,
    )
