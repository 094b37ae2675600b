"""Memory of pipeline stages on GPUs as a processor reaches it, which relays what lies there from
and to other hosts.

NOTE: a processor says that data are there by a store behind that of the data, and a GPU looks for
that. So stores have to keep their order, as those of x86-64 do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headwater.kernels.stage.stage_memory import (
    ARRIVED,
    HEADER,
    LENGTHS,
    NUM_LANES,
    NUM_SLOTS,
    TAKEN,
    StageSizes,
)

from ...executor import Int32Array, UInt8Array


def lanes_of(num_rows: int) -> slice:
    """Lanes that have rows of a tensor of so many."""
    return slice(min(num_rows, NUM_LANES.value))


class LaneSlots:
    """Slots for tensors of rows, a power of two of them. Lanes use them by turns, each on its own:
    the slot of a row is given by the number of its lane's tensor."""

    def __init__(self, memory: UInt8Array, num_slots: int, row_bytes: int) -> None:
        """memory: [num_slots * bytes of a slot]."""
        slots = memory.reshape(num_slots, -1)
        self.row_bytes = row_bytes
        self.most_rows = slots.shape[1] // row_bytes
        """Rows that a slot holds."""
        self._slots = [slot[: self.most_rows * row_bytes].reshape(-1, row_bytes) for slot in slots]

    def rows_of(self, message: memoryview) -> UInt8Array:
        """Rows [N, row bytes] of a tensor. Raises `ValueError` for a part of a row, or more rows
        than fit a slot."""
        num_rows, rest = divmod(len(message), self.row_bytes)
        if rest or num_rows > self.most_rows:
            most = f"at most {self.most_rows} rows of {self.row_bytes} bytes"
            raise ValueError(f"a tensor of another host has {len(message)} bytes; allowed: {most}")
        return np.frombuffer(message, np.uint8).reshape(-1, self.row_bytes)

    def read(self, numbers: Int32Array, rows: UInt8Array) -> None:
        """Fills rows [N, row bytes] with those of a tensor. `numbers`: the tensor's, of each lane
        that has rows of it."""
        for slot, where in self._parts(numbers, len(rows)):
            rows[where] = slot[where]

    def write(self, numbers: Int32Array, rows: UInt8Array) -> None:
        """Does the opposite of `read`."""
        for slot, where in self._parts(numbers, len(rows)):
            slot[where] = rows[where]

    def _parts(
        self, numbers: Int32Array, num_rows: int
    ) -> Iterator[tuple[UInt8Array, slice | np.ndarray]]:
        """Each slot and which of its rows belong to the tensor."""
        turns = np.resize(numbers & (len(self._slots) - 1), num_rows)
        for turn, slot in enumerate(self._slots):
            is_here = turns == turn
            yield slot[:num_rows], slice(None) if is_here.all() else is_here


class Piece:
    """The piece of memory of a stage; see `stage_memory`."""

    def __init__(self, memory: UInt8Array, sizes: StageSizes, row_bytes: int) -> None:
        header = memory[: HEADER.value].view(np.int32).reshape(-1, NUM_LANES.value)
        self.arrived, self.taken, self.lengths = (
            header[row.value] for row in (ARRIVED, TAKEN, LENGTHS)
        )
        """int32 [NUM_LANES] each."""
        self.streams = LaneSlots(
            memory[HEADER.value : sizes.first_message], NUM_SLOTS.value, row_bytes
        )
        words = memory[sizes.first_message : sizes.num_bytes].view(np.int32)
        num_words = sizes.num_messages * sizes.message_len
        self._messages = words[:num_words].reshape(sizes.num_messages, sizes.message_len)

    def message(self, number: int) -> Int32Array:
        """Slot of that message of tokens."""
        slot: Int32Array = self._messages[number % len(self._messages)]
        return slot
