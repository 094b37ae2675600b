"""KV blocks between a GPU and host memory, beside the steps: a stream each way, through buffers on the GPU.

In the cache a block lies in a piece for every layer, in host memory in one: the bus is fast with large pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from headwater.kernels.copy_blocks import as_planes, copy_blocks
from headwater.kernels.device import upload

from ..executor import Int32Array, SwapPlan, UInt8Array
from .cuda_direct_copies import CudaDirectCopies
from .locked_slots import LockedSlots, OwnSlots

STAGING_BYTES = 128 << 20
"""Each way; milliseconds of the bus, beside which a launch is nothing."""


class CudaSwapper:
    """See `Swapper`."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], num_slots: int, slots: LockedSlots | None = None) -> None:
        """kv_caches [layers, 2, num_blocks, Hk, block_size, D] of each model whose keys and values a block has.
        `slots`: those that a rank shares with others; None: slots of its own. Raises `ConfigError` where there is no
        such memory."""
        self._caches, self._device = [as_planes(each) for each in kv_caches], kv_caches[0].device
        num_words = [planes.shape[0] * planes.shape[2] for planes in self._caches]
        device, num_staged = self._device, staged_blocks(4 * sum(num_words))
        self._host = OwnSlots((num_slots, sum(num_words))) if slots is None else slots
        self._out_words, self._in_words = torch.empty((2, num_staged, sum(num_words)), dtype=torch.int32, device=device)
        self._staged_out, self._staged_in = self._split(self._out_words), self._split(self._in_words)
        self._order = torch.arange(num_staged, dtype=torch.int32, device=device)
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        # The cache, the buffers and their order are made on the stream that is current here.
        for stream in (self._out, self._in):
            stream.wait_stream(torch.cuda.current_stream(device))
        self._read, self._written, self._loads = _Pending(), _Pending(), deque[tuple[torch.cuda.Event, int]]()
        self._saves = deque[tuple[torch.cuda.Event, int]]()
        self._num_loaded = self._num_saved = 0
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
        for cache, staged in zip(self._caches, self._staged_out, strict=True):
            copy_blocks(cache, staged, self._order[:1], self._order[:1])
            copy_blocks(staged, cache, self._order[:1], self._order[:1])

    def swap(self, plan: SwapPlan) -> None:
        if plan.out_blocks.size:
            with torch.cuda.stream(self._out):
                self._copy_out(plan.out_blocks, plan.out_slots)
        if plan.in_blocks.size:
            with torch.cuda.stream(self._in):
                self._written.let_wait(self._in, plan.in_slots)
                self._read.let_wait(self._in, plan.in_blocks)
                self._copy_in(plan.in_slots, plan.in_blocks)

    @property
    def num_loaded(self) -> int:
        while self._loads and _has_passed(self._loads[0][0]):
            self._num_loaded += self._loads.popleft()[1]
        return self._num_loaded

    @property
    def num_saved(self) -> int:
        while self._saves and _has_passed(self._saves[0][0]):
            self._num_saved += self._saves.popleft()[1]
        return self._num_saved

    def protect(self, stream: torch.cuda.Stream, blocks: Int32Array) -> None:
        """Lets `stream` wait until copies have read these blocks: later launches on it may write to them."""
        self._read.let_wait(stream, blocks)

    def close(self) -> None:
        """With nothing in flight."""
        self._host.release()

    def measure(self) -> None:
        """Times the way of blocks from host memory to the buffer on the GPU, as many as cross together. To be called
        before the first copy."""
        num_blocks = min(len(self._order), len(self.slots))
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch ships it so
        with torch.cuda.stream(self._in):
            # The first copy may wait for what is loaded when it is needed.
            for event in (begin, end):
                self._host.copy_in(slice(0, num_blocks), self._in_words[:num_blocks])
                event.record()
        end.synchronize()
        self.seconds_per_block = float(begin.elapsed_time(end)) / 1e3 / num_blocks

    def _copy_out(self, blocks: Int32Array, slots: Int32Array) -> None:
        for part in self._parts(blocks.size):
            words = self._out_words[: part.stop - part.start]
            ids = upload(blocks[part], self._device)
            for cache, staged in zip(self._caches, self._staged_out, strict=True):
                copy_blocks(cache, staged, ids, self._order[: len(words)])
            self._read.note(self._out, blocks[part])
            for at, run in _runs(slots[part]):
                self._host.copy_out(words[at], run)
            self._written.note(self._out, slots[part])
            self._saves.append((self._out.record_event(), len(words)))

    def _copy_in(self, slots: Int32Array, blocks: Int32Array) -> None:
        for part in self._parts(blocks.size):
            words = self._in_words[: part.stop - part.start]
            for at, run in _runs(slots[part]):
                self._host.copy_in(run, words[at])
            ids = upload(blocks[part], self._device)
            for cache, staged in zip(self._caches, self._staged_in, strict=True):
                copy_blocks(staged, cache, self._order[: len(words)], ids)
            self._loads.append((self._in.record_event(), len(words)))

    def _split(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Staged blocks [N, words] as planes of each cache."""
        sizes = [planes.shape[0] * planes.shape[2] for planes in self._caches]
        parts = torch.split(words, sizes, dim=1)
        return [
            part.view(len(part), planes.shape[0], planes.shape[2]).transpose(0, 1)
            for part, planes in zip(parts, self._caches, strict=True)
        ]

    def _parts(self, num_blocks: int) -> Iterator[slice]:
        """As many at once as are staged."""
        for start in range(0, num_blocks, len(self._order)):
            yield slice(start, min(start + len(self._order), num_blocks))


class _Pending:
    """Places that a stream still reads, or still writes."""

    def __init__(self) -> None:
        self._places: deque[tuple[torch.cuda.Event, frozenset[int]]] = deque()

    def note(self, stream: torch.cuda.Stream, places: Int32Array) -> None:
        self._forget_done()
        self._places.append((stream.record_event(), frozenset(places.tolist())))

    def let_wait(self, stream: torch.cuda.Stream, places: Int32Array) -> None:
        """Only if any of these places is among them."""
        self._forget_done()
        theirs: Collection[int] = places.tolist() if self._places else ()
        for event, mine in self._places:
            if not mine.isdisjoint(theirs):
                stream.wait_event(event)

    def _forget_done(self) -> None:
        while self._places and _has_passed(self._places[0][0]):
            self._places.popleft()


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
