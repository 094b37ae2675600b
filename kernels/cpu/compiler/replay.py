"""Calls of a recorded computation, made again by one call from Python, on the threads that torch
computes with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from .compiled import barrier_address, team
from .machine_code import compiling
from .recording import Recording, UnrecordableError
from .scalars import int64_at
from .simd_types import I64

ALIGNMENT = 64
"""Alignment in bytes: a cache line, so that no two tensors share one."""
LEAST_ADDRESS = 1 << 32
"""Smallest argument that is taken for an address; smaller ones are numbers, such as sizes."""


class Replay:
    """A recorded computation whose result is one tensor.

    The other tensors that it made lie in memory of the replay, in which tensors that are not needed
    at the same time share bytes. What the computation read from elsewhere (weights, a cache, its
    inputs) is read from the same addresses again: its owner keeps it there."""

    def __init__(self, recording: Recording, result: torch.Tensor) -> None:
        """`result` is a tensor that the recorded computation made, whole and contiguous. Raises
        `UnrecordableError`."""
        assert result.is_contiguous()
        calls = recording.calls
        self._num_threads = torch.get_num_threads()
        starts = np.cumsum([0, *(len(call.memory) for call in calls)])
        self._words = np.concatenate([np.asarray(call.memory, np.int64) for call in calls])
        spans = sorted((each.data_ptr(), each.nbytes) for each in recording.tensors if each.nbytes)
        if (result.data_ptr(), result.nbytes) not in spans:
            raise UnrecordableError("a result that it was given", "a tensor that it makes, whole")
        if spans[0][0] < LEAST_ADDRESS:
            raise UnrecordableError(
                f"a tensor at address {spans[0][0]}", f"{LEAST_ADDRESS} and above"
            )
        places = _Places(spans, self._words, np.repeat(np.arange(len(calls)), np.diff(starts)))
        self._shape = result.shape
        self._dtype = result.dtype
        self._result_words, self._result_offsets = places.words_of(result.data_ptr())
        self._memory = torch.empty(
            places.lay_out(without=result.data_ptr()) + ALIGNMENT, dtype=torch.uint8
        )
        start = -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        places.move_to(start, self._words)
        # Each run overwrites these: counters of items are among them.
        self._run_words = self._words.copy()
        addresses = self._run_words.ctypes.data + 8 * starts[:-1]
        self._pairs = np.stack(([call.address for call in calls], addresses), axis=1).astype(
            np.int64
        )
        barrier = barrier_address() if self._num_threads > 1 else 0
        # As `_walk` reads it.
        self._header = array("q", (len(calls), barrier, self._pairs.ctypes.data))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the replay holds."""
        return self._memory.nbytes + 2 * self._words.nbytes + self._pairs.nbytes

    def __call__(self) -> torch.Tensor:
        """Computes once more. Returns a new tensor."""
        result = torch.empty(self._shape, dtype=self._dtype)
        self._run_words[:] = self._words
        self._run_words[self._result_words] = self._result_offsets + result.data_ptr()
        call, address = walker()
        p_header = self._header.buffer_info()[0]
        if self._num_threads > 1 and (run_team := team()) is not None:
            run_team(address, p_header, self._num_threads, 0)
        else:
            call(p_header)
        return result


class _Places:
    """Uses of a recording's tensors, and their places in memory that they share."""

    def __init__(self, spans: Sequence[tuple[int, int]], words: Any, call_of: Any) -> None:
        """spans: address and bytes of tensors, in order; words int64 [W]: all arguments; call_of
        int [W]: the call of each of them."""
        self._starts = np.array([start for start, _ in spans], np.int64)
        self._sizes = np.array([size for _, size in spans], np.int64)
        owner = np.searchsorted(self._starts, words, side="right") - 1
        is_inside = (owner >= 0) & (words - self._starts[owner] < self._sizes[owner])
        self._words = np.flatnonzero(is_inside)
        self._owners = owner[self._words]
        self._calls = call_of[self._words]
        self._offsets = words[self._words] - self._starts[self._owners]
        self._placed = np.full(len(spans), -1, np.int64)

    def words_of(self, start: int) -> tuple[Any, Any]:
        """Indices of the words that point into the tensor that begins at `start`, and their offsets
        in it."""
        own = self._owners == np.searchsorted(self._starts, start)
        return self._words[own], self._offsets[own]

    def lay_out(self, *, without: int) -> int:
        """Gives every tensor that a call uses a place, but the one that begins at `without`.
        Returns bytes in all."""
        end = 0
        live = list[tuple[int, int, int]]()
        excluded = np.searchsorted(self._starts, without)
        for index in dict.fromkeys(self._owners.tolist()):
            if index == excluded:
                continue
            uses = self._calls[self._owners == index]
            live = [each for each in live if each[2] >= uses[0]]
            size = -(-int(self._sizes[index]) // ALIGNMENT) * ALIGNMENT
            at = _first_gap(sorted(live), size)
            self._placed[index] = at
            end = max(end, at + size)
            live.append((at, size, int(uses[-1])))
        return end

    def move_to(self, start: int, words: Any) -> None:
        """Makes the words point to the places, in memory that begins at `start`."""
        is_placed = self._placed[self._owners] >= 0
        moved = start + self._placed[self._owners] + self._offsets
        words[self._words[is_placed]] = moved[is_placed]


def _first_gap(live: Sequence[tuple[int, int, int]], size: int) -> int:
    """Lowest place of `size` bytes beside live tensors (place, bytes, last use), in order of
    places."""
    at = 0
    for place, taken, _ in live:
        if place - at >= size:
            break
        at = max(at, place + taken)
    return at


@intrinsic
def _call_with(typing: Any, address: Any, argument: Any) -> Any:
    """Calls a function of one int64 by its address."""

    def generate(context: Any, builder: ir.IRBuilder, __: Any, a: list[Any]) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(a[0], kind), [a[1]])
        return context.get_dummy_value()

    return types.void(I64, I64), generate


def _walk(header: int) -> None:
    num_calls = int64_at(header)
    barrier = int64_at(header + 8)
    pairs = int64_at(header + 16)
    for i in range(num_calls):
        _call_with(int64_at(pairs + 16 * i), int64_at(pairs + 16 * i + 8))
        if barrier:
            # The function takes no argument and ignores this one.
            _call_with(barrier, 0)


@cache
def walker() -> tuple[Any, int]:
    """The function that makes all recorded calls, each thread its part of each, and its address."""
    with compiling(_walk) as is_kept:
        machine_code = cfunc("void(int64)", cache=is_kept)(_walk)
    return machine_code.ctypes, machine_code.address
