"""KV blocks between a GPU and host memory, beside the steps: a stream each way, through buffers on
the GPU.

In the cache a block lies in a piece for every layer, in host memory in one: the bus is fast with
large pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from headwater.kernels.blocks.copy_blocks import as_planes, copy_blocks
from headwater.kernels.launch.device import upload

from ...executor import Int32Array, StepPlan, SwapPlan, UInt8Array
from .cuda_direct_copies import CudaDirectCopies
from .locked_slots import LockedSlots, ProcessSlots
from .save_queue import Launched, SavePart, SaveQueue

STAGING_BYTES = 128 << 20
"""Each way; milliseconds of the bus, beside which a launch is nothing."""


class CudaSwapper:
    """See `Swapper`. Loads are launched at once, saves while few others are on their way."""

    def __init__(
        self, kv_caches: Sequence[torch.Tensor], num_slots: int, slots: LockedSlots | None = None
    ) -> None:
        """kv_caches [layers, 2, num_blocks, Hk, block_size, D] of each model whose keys and values
        a block has. `slots`: those that a rank shares with others; None: slots of its own. Raises
        `ConfigError` where there is no such memory."""
        self._caches = [as_planes(each) for each in kv_caches]
        self._device = kv_caches[0].device
        self._block_size = kv_caches[0].shape[4]
        num_words = sum(planes.shape[0] * planes.shape[2] for planes in self._caches)
        self._host = ProcessSlots((num_slots, num_words)) if slots is None else slots
        self._out, self._in = _Staging(self._caches, self._host), _Staging(self._caches, self._host)
        self._saves = SaveQueue(self._caches[0].shape[1], num_slots)
        self._loads = deque[tuple[torch.cuda.Event, int]]()
        self._num_loaded = 0
        self.slots: UInt8Array = self._host.bytes
        self.seconds_per_block = 0.0
        """Known once it is measured."""
        self.direct_copies: CudaDirectCopies | None = None

    def copy_directly(self) -> None:
        """From now on engines of this host may copy blocks out of each other's KV caches."""
        self.direct_copies = CudaDirectCopies(self._caches, self.protect)

    def rehearse(self) -> None:
        """Launches what copies launch: block 0, which is nobody's."""
        if self.direct_copies is not None:
            self.direct_copies.rehearse()
        self._out.rehearse()

    def swap(self, plan: SwapPlan) -> None:
        if plan.out_blocks.size:
            self._saves.add(self._save_parts(plan.out_blocks, plan.out_slots))
        if plan.in_blocks.size:
            self._saves.let_wait_for_writes(self._in.stream, plan.in_slots)
            self._saves.let_wait_for_reads(self._in.stream, plan.in_blocks)
            self._load(plan.in_slots, plan.in_blocks)

    @property
    def num_loaded(self) -> int:
        while self._loads and _has_passed(self._loads[0][0]):
            self._num_loaded += self._loads.popleft()[1]
        return self._num_loaded

    @property
    def num_saved(self) -> int:
        return self._saves.num_saved

    def precede(self, plan: StepPlan) -> None:
        """See `Tiers`. The stream of steps is current here."""
        self.protect(torch.cuda.current_stream(self._device), plan.written_blocks(self._block_size))

    def protect(self, stream: torch.cuda.Stream, blocks: Int32Array) -> None:
        """Lets `stream` wait until copies have read these blocks: later launches on it may write to
        them."""
        self._saves.let_wait_for_reads(stream, blocks)

    def close(self) -> None:
        """With no load in flight. Saves that are not launched are dropped."""
        self._saves.close()
        self._host.release()

    def measure(self) -> None:
        """Times the way of blocks from host memory to the buffer on the GPU, as many as cross
        together. To be called before the first copy."""
        num_blocks = min(len(self._in.words), len(self.slots))
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        with torch.cuda.stream(self._in.stream):
            # The first copy may wait for what is loaded when it is needed.
            for event in (begin, end):
                self._host.copy_in(slice(0, num_blocks), self._in.words[:num_blocks])
                event.record()
        end.synchronize()
        self.seconds_per_block = float(begin.elapsed_time(end)) / 1e3 / num_blocks

    def _save_parts(self, blocks: Int32Array, slots: Int32Array) -> list[SavePart]:
        with torch.cuda.stream(self._out.stream):
            # One for all parts: it takes as long as the other launches of a part.
            ids = upload(blocks, self._device)
        return [
            SavePart(blocks[part], slots[part], partial(self._out.copy_out, ids[part], slots[part]))
            for part in self._out.parts(blocks.size)
        ]

    def _load(self, slots: Int32Array, blocks: Int32Array) -> None:
        for part in self._in.parts(blocks.size):
            with torch.cuda.stream(self._in.stream):
                written = self._in.copy_in(slots[part], upload(blocks[part], self._device))
            self._loads.append((written, blocks[part].size))


class _Staging:
    """Buffer on the GPU through which blocks go one way, as many at once as it has room for, and
    the stream of their copies."""

    def __init__(self, caches: Sequence[torch.Tensor], host: LockedSlots) -> None:
        """caches int32 [planes, num_blocks, words]"""
        device = caches[0].device
        sizes = [planes.shape[0] * planes.shape[2] for planes in caches]
        num_staged = staged_blocks(4 * sum(sizes))
        self._caches = caches
        self._host = host
        self.words = torch.empty((num_staged, sum(sizes)), dtype=torch.int32, device=device)
        self._planes = [
            part.view(num_staged, planes.shape[0], planes.shape[2]).transpose(0, 1)
            for part, planes in zip(torch.split(self.words, sizes, dim=1), caches, strict=True)
        ]
        """The buffer as planes of each cache."""
        self._order = torch.arange(num_staged, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        # The cache, the buffer and its order are made on the stream that is current here.
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def rehearse(self) -> None:
        """Copies block 0 to the buffer and back."""
        for cache, staged in zip(self._caches, self._planes, strict=True):
            copy_blocks(cache, staged, self._order[:1], self._order[:1])
            copy_blocks(staged, cache, self._order[:1], self._order[:1])

    def parts(self, num_blocks: int) -> Iterator[slice]:
        """As many at once as are staged."""
        for start in range(0, num_blocks, len(self.words)):
            yield slice(start, min(start + len(self.words), num_blocks))

    def copy_out(self, blocks: torch.Tensor, slots: Int32Array) -> Launched:
        """Launches the copies of a part. blocks int32 [N], slots [N]"""
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships it so
        # A thread that waits for it sleeps.
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch ships it so
        with torch.cuda.stream(self.stream):
            for cache, staged in zip(self._caches, self._planes, strict=True):
                copy_blocks(cache, staged, blocks, self._order[: slots.size])
            read.record()
            for at, run in _runs(slots):
                self._host.copy_out(self.words[at], run)
            written.record()
        return Launched(read, written)

    def copy_in(self, slots: Int32Array, blocks: torch.Tensor) -> torch.cuda.Event:
        """Launches the copies of a part on the current stream. slots [N], blocks int32 [N]"""
        for at, run in _runs(slots):
            self._host.copy_in(run, self.words[at])
        for cache, staged in zip(self._caches, self._planes, strict=True):
            copy_blocks(staged, cache, self._order[: slots.size], blocks)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships it so
        written.record()
        return written


def staged_blocks(block_bytes: int) -> int:
    """Blocks that cross together, each way."""
    return max(1, STAGING_BYTES // block_bytes)


def _runs(slots: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Neighbours among slots, with where they are in the array."""
    bounds = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), slots.size]
    for start, end in pairwise(bounds):
        yield slice(start, end), slice(int(slots[start]), int(slots[start]) + end - start)


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]  # torch ships it so
