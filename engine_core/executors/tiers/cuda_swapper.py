"""KV blocks between a GPU and host memory, beside the steps: a stream each way, and one copy a
block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from ...executor import Int32Array, StepPlan, SwapPlan, UInt8Array
from ..model.kv_blocks import KvBlocks
from .cuda_direct_copies import CudaDirectCopies
from .locked_slots import LockedSlots, ProcessSlots
from .save_queue import SavePart, SaveQueue

PART_BYTES = 32 << 20
"""Copied between two events: half a millisecond of the bus, for which a step that writes to one of
the blocks waits at most."""


class CudaSwapper:
    """See `Swapper`. Loads are launched at once, saves while few others are on their way."""

    def __init__(self, blocks: KvBlocks, num_slots: int, slots: LockedSlots | None = None) -> None:
        """`slots`: slots that a rank shares with others; None: slots of its own. Raises
        `ConfigError` where memory is too short."""
        self._blocks = blocks.words
        self._block_size = blocks.block_size
        self._device = self._blocks.device
        self._host = ProcessSlots((num_slots, self._blocks.shape[1])) if slots is None else slots
        self._out, self._in = (_stream(self._device) for _ in range(2))
        self._saves = SaveQueue(len(self._blocks), num_slots)
        self._loads = deque[tuple[torch.cuda.Event, int]]()
        self._num_loaded = 0
        self.slots: UInt8Array = self._host.bytes
        self.seconds_per_block = 0.0
        """Measured at the first copies."""
        self.direct_copies: CudaDirectCopies | None = None

    def copy_directly(self) -> None:
        """Lets engines of this host copy blocks out of each other's KV caches."""
        self.direct_copies = CudaDirectCopies(self._blocks, self.protect)

    def rehearse(self) -> None:
        """Launches the kernels of copies with block 0, which no request holds."""
        if self.direct_copies is not None:
            self.direct_copies.rehearse()

    def swap(self, plan: SwapPlan) -> None:
        if plan.out_blocks.size:
            parts = self._parts(plan.out_blocks, plan.out_slots)
            self._saves.add([SavePart(*part, partial(self._save, *part)) for part in parts])
        if plan.in_blocks.size:
            self._saves.let_wait_for_writes(self._in, plan.in_slots)
            self._saves.let_wait_for_reads(self._in, plan.in_blocks)
            for part in self._parts(plan.in_blocks, plan.in_slots):
                self._load(*part)

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
        """Makes `stream` wait until copies have read these blocks, so that later launches on it may
        write to them."""
        self._saves.let_wait_for_reads(stream, blocks)

    def close(self) -> None:
        """Closes the swapper while no load is in flight. Saves that are not launched are
        dropped."""
        self._saves.close()
        self._host.release()

    def measure(self) -> None:
        """Measures the time of a block from host memory, by a copy of as many as are copied
        together. To be called before the first copy: block and slots contain zeros."""
        num_blocks = min(self.blocks_of_part, len(self._blocks), len(self.slots))
        places = np.arange(num_blocks, dtype=np.int32)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        with torch.cuda.stream(self._in):
            # The first copy may wait for what is loaded when it is needed.
            for event in (begin, end):
                self._host.copy_in(self._blocks, places, places)
                event.record()
        end.synchronize()
        self.seconds_per_block = float(begin.elapsed_time(end)) / 1e3 / num_blocks

    @property
    def blocks_of_part(self) -> int:
        """Blocks whose copies are launched together."""
        return max(1, PART_BYTES // self._blocks[0].nbytes)

    def _parts(
        self, blocks: Int32Array, slots: Int32Array
    ) -> Iterator[tuple[Int32Array, Int32Array]]:
        """Blocks and slots of copies that are launched together. Saves into one slot, which are
        neighbours, are in one part."""
        start = 0
        while start < blocks.size:
            stop = min(start + self.blocks_of_part, blocks.size)
            while stop < blocks.size and slots[stop] == slots[stop - 1]:
                stop += 1
            yield blocks[start:stop], slots[start:stop]
            start = stop

    def _save(self, blocks: Int32Array, slots: Int32Array) -> torch.cuda.Event:
        # A thread that waits for this event sleeps instead of spinning.
        written = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch ships it so
        # The last save into a slot counts; copies of one launch have no order.
        last = slots.size - 1 - np.unique(slots[::-1], return_index=True)[1]
        with torch.cuda.stream(self._out):
            self._host.copy_out(self._blocks, blocks[last], slots[last])
            written.record()
        return written

    def _load(self, blocks: Int32Array, slots: Int32Array) -> None:
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch ships it so
        with torch.cuda.stream(self._in):
            self._host.copy_in(self._blocks, blocks, slots)
            written.record()
        self._loads.append((written, blocks.size))


def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose launches wait for the launches of the current stream."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]  # torch ships it so
