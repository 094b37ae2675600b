"""Copies of KV blocks to host memory that wait for their turn.

Few are on their way at once, so that no step launches many: a thread launches the others as those
end, also while no step runs. Knows numbers of blocks and slots; knows nothing about how copies are
made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...executor import Int32Array
from ...system.worker_thread import start_worker

MOST_ON_WAY = 2
"""Parts on their way at once: the bus is busy with one while the next is launched."""


@dataclass(frozen=True, slots=True)
class SavePart:
    """Copies that are launched together."""

    blocks: Int32Array
    slots: Int32Array
    launch: Callable[[], torch.cuda.Event]
    """Returns the event that follows the copies: blocks have been read, and slots are written."""


class SaveQueue:
    """Parts are launched, and end, in the order in which they were added. All methods but
    `num_saved` are for one thread, which also writes to blocks and reads slots. An error in the
    queue's own thread ends the process, since the device is unusable."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_saved = 0
        """Number of blocks whose copies have ended."""
        self._read_by = np.zeros(num_blocks, np.int64)
        """Number, from 1 on, of the last part that reads a block; 0: none does."""
        self._filled_by = np.zeros(num_slots, np.int64)
        """Number of the last part that fills a slot."""
        self._held = deque[SavePart]()
        self._on_way = deque[tuple[torch.cuda.Event, int]]()
        """Saves under way: the event of their end, and their number of blocks."""
        self._num_added = self._num_ended = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = start_worker("saves", self._run)

    def add(self, parts: Sequence[SavePart]) -> None:
        """Launches parts as soon as few are in flight before them."""
        with self._changed:
            for part in parts:
                self._num_added += 1
                self._read_by[part.blocks] = self._filled_by[part.slots] = self._num_added
                self._held.append(part)
            self._changed.notify()

    def let_wait_for_reads(self, stream: torch.cuda.Stream, blocks: Int32Array) -> None:
        """Makes `stream` wait until the added parts have read these blocks. Parts that are not
        launched yet are launched now."""
        if (launched := self._launched(self._read_by, blocks)) is not None:
            stream.wait_event(launched)

    def let_wait_for_writes(self, stream: torch.cuda.Stream, slots: Int32Array) -> None:
        """Like `let_wait_for_reads`, until these slots are completely written."""
        if (launched := self._launched(self._filled_by, slots)) is not None:
            stream.wait_event(launched)

    def close(self) -> None:
        """Drops held parts, and waits for copies in flight."""
        with self._changed:
            self._is_closed = True
            self._held.clear()
            self._changed.notify()
        self._thread.join()

    def _launched(
        self, part_of: npt.NDArray[np.int64], places: Int32Array
    ) -> torch.cuda.Event | None:
        """The last part that copies one of these blocks or slots; None if all of them have
        ended."""
        number = int(part_of[places].max(initial=0))
        # Without the lock, which is held while a part is launched: this number only grows.
        if number <= self._num_ended:
            return None
        with self._changed:
            while self._num_ended + len(self._on_way) < number:
                self._launch_next()
            index = number - self._num_ended - 1
            return self._on_way[index][0] if index >= 0 else None

    def _launch_next(self) -> None:
        part = self._held.popleft()
        self._on_way.append((part.launch(), part.blocks.size))

    def _run(self) -> None:
        while (launched := self._next()) is not None:
            launched.synchronize()
            with self._changed:
                self.num_saved += self._on_way.popleft()[1]
                self._num_ended += 1

    def _next(self) -> torch.cuda.Event | None:
        """The part that ends next, after launching as many later ones as allowed; None once the
        queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._on_way or self._is_closed)
            while self._held and len(self._on_way) < MOST_ON_WAY:
                self._launch_next()
            return self._on_way[0][0] if self._on_way else None
