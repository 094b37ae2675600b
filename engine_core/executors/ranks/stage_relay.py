"""Messages of a pipeline stage on a GPU to and from stages on other hosts. Kernels write and await
them in host memory as if the other stages were here; threads of the rank's process move them
between that memory and the rank's rings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch

from headwater.kernels.stage.stage_memory import NUM_LANES, NUM_SLOTS

from ...executor import Int32Array
from ...system.ring import PeerGone
from ...system.worker_thread import start_worker
from ..exit.stage_messages import Receiver, Sender
from .stage_link import StageLinks
from .stage_pieces import Piece, lanes_of

LEAST_PAUSE = 2e-5
MOST_PAUSE = 5e-4
"""Seconds between two looks at what kernels write: a sixteenth of the wait until then, within
these."""
T = TypeVar("T")


class SentStreams:
    """Streams that kernels send to a stage on another host."""

    def __init__(self, own: Piece, behind: Piece) -> None:
        self._own = own
        self._behind = behind
        self._taken: Int32Array = np.zeros(NUM_LANES.value, np.int32)

    def take(self) -> bytes | None:
        """The next stream as a message; None: it has not arrived whole."""
        next_of_first = self._taken[:1] + 1
        # Differences, which are right when both have wrapped.
        if (self._behind.arrived[:1] - next_of_first < 0).any():
            return None
        num_rows = int(self._behind.lengths[next_of_first & 1][0])
        lanes = lanes_of(num_rows)
        numbers = self._taken[lanes] + 1
        if (self._behind.arrived[lanes] - numbers < 0).any():
            return None
        rows = np.empty((num_rows, self._behind.streams.row_bytes), np.uint8)
        self._behind.streams.read(numbers, rows)
        self._taken[lanes] = self._own.taken[lanes] = numbers
        return rows.tobytes()


class ReceivedStreams:
    """Streams of a stage on another host, for kernels to receive."""

    def __init__(self, own: Piece, before: Piece) -> None:
        self._own = own
        self._before = before
        self._sent: Int32Array = np.zeros(NUM_LANES.value, np.int32)

    def put(self, stream: memoryview) -> None:
        """Waits for room. Raises `ValueError` for a part of a row, or more rows than a slot has."""
        rows = self._own.streams.rows_of(stream)
        lanes = lanes_of(len(rows))
        numbers = self._sent[lanes] + 1
        _found(lambda: True if self._has_room(numbers) else None)
        self._own.streams.write(numbers, rows)
        self._sent[lanes] = self._own.arrived[lanes] = numbers

    def _has_room(self, numbers: Int32Array) -> bool:
        """Whether the streams before these are taken in whose slots these belong."""
        return bool((self._before.taken[: len(numbers)] - (numbers - NUM_SLOTS.value) >= 0).all())


class SendThread:
    """Sends what kernels write to ranks on other hosts, in the order of their launches.

    NOTE: it looks for what they write, and calls nothing of the device's driver. A call may wait
    for a launch, which may wait for a message of another host, which may wait for one that this
    sends."""

    def __init__(self) -> None:
        self._noted: SimpleQueue[tuple[Callable[[], bytes | None], Sequence[Sender]]] = (
            SimpleQueue()
        )

    def note(self, look: Callable[[], bytes | None], senders: Sequence[Sender]) -> None:
        """To be called for each launch that writes a message, which `look` finds; None until it is
        there."""
        self._noted.put((look, senders))

    def note_message(self, number: int, words: Int32Array, senders: Sequence[Sender]) -> None:
        """As `note`, of a message of that number in these words."""
        self.note(lambda: words.tobytes() if words[0] == number else None, senders)

    def run(self) -> None:
        """Raises `PeerGone`."""
        while True:
            look, senders = self._noted.get()
            message = _found(look)
            for sender in senders:
                _send(sender, message)


class StageRelay:
    """Relay of one rank of a stage: of its streams and tokens from and to other hosts. Methods that
    note something are called in the order of launches."""

    def __init__(
        self,
        own: Piece,
        before: Piece | None,
        behind: Piece | None,
        links: StageLinks,
    ) -> None:
        """`before` and `behind`: pieces of the stages next to this one that are on other hosts."""
        self._own = own
        self._before = before
        self._links = links
        self._received = None if before is None else ReceivedStreams(own, before)
        self._sent = None if behind is None else SentStreams(own, behind)
        self._sender = SendThread() if behind is not None or links.tokens_out else None

    def start(self) -> None:
        """Takes the ends of the rank's links, which no other thread uses from now on."""
        if self._sender is not None:
            _run_thread(self._sender.run)
        if self._received is not None:
            _run_thread(self._receive_streams)
        if self._links.tokens_in is not None:
            _run_thread(self._receive_tokens)

    def note_layers(self) -> None:
        """Notes a launch of layers, which sends a stream unless this is the last stage."""
        if self._sent is not None:
            assert self._sender is not None
            assert self._links.stream_out is not None
            self._sender.note(self._sent.take, [self._links.stream_out])

    def note_tokens(self, number: int, num_words: int) -> None:
        """Notes a message of the last stage to all others."""
        assert self._sender is not None
        assert self._before is not None
        self._sender.note_message(
            number, self._before.message(number)[:num_words], self._links.tokens_out
        )

    def _receive_streams(self) -> None:
        assert self._received is not None
        assert self._links.stream_in is not None
        while True:
            self._received.put(_next(self._links.stream_in))

    def _receive_tokens(self) -> None:
        assert self._links.tokens_in is not None
        while True:
            words = np.frombuffer(_next(self._links.tokens_in), np.int32)
            slot = self._own.message(int(words[0]))
            slot[1 : len(words)] = words[1:]
            # A kernel awaits the number.
            slot[:1] = words[:1]


def _send(sender: Sender, message: bytes) -> None:
    """Sends a message whose length the other side does not know."""
    sender.send(torch.tensor([len(message)]))
    sender.send(torch.frombuffer(bytearray(message), dtype=torch.uint8))


def _next(receiver: Receiver) -> memoryview:
    """Waits for a message of `_send`."""
    length = torch.empty(1, dtype=torch.int64)
    receiver.post(length)()
    message = torch.empty(int(length), dtype=torch.uint8)
    receiver.post(message)()
    return memoryview(message.numpy().data)


def _found(look: Callable[[], T | None]) -> T:
    """Looks for what a kernel is going to write until it is there: the sooner again, the shorter it
    has waited."""
    began = time.perf_counter()
    while (found := look()) is None:
        waited = time.perf_counter() - began
        time.sleep(min(max(waited / 16, LEAST_PAUSE), MOST_PAUSE))
    return found


def _run_thread(work: Callable[[], None]) -> None:
    def run() -> None:
        # The executor sees which rank is gone, and ends this process.
        with contextlib.suppress(PeerGone):
            work()

    start_worker("stage relay", run)
