"""Messages of a pipeline stage on a GPU to and from stages on other hosts. Kernels write and await them in host memory
as if the other stages were here; threads of the rank's process move them between that memory and the rank's rings."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from headwater.kernels.stage_memory import ARRIVED, HEADER, LENGTHS, NUM_LANES, NUM_SLOTS, TAKEN, StageSizes

from ..executor import Int32Array, UInt8Array
from ..ring import PeerGone
from .stage_link import Receiver, StageLinks, Writer

STREAM = bytes(4)
"""First word of a stream in a ring; that of other messages is their number, from 1 on."""
LEAST_PAUSE, MOST_PAUSE = 2e-5, 5e-4
"""Seconds between two looks at what kernels write: a sixteenth of the wait until then, within these."""
T = TypeVar("T")


class Piece:
    """The piece of memory of a stage (see `stage_memory`), as a processor reaches it.

    NOTE: a processor says that data are there by a store behind that of the data, and a GPU looks for that. So stores
    have to keep their order, as those of x86-64 do."""

    def __init__(self, memory: UInt8Array, sizes: StageSizes, row_bytes: int) -> None:
        header = memory[: HEADER.value].view(np.int32).reshape(-1, NUM_LANES.value)
        self.arrived, self.taken, self.lengths = (header[row.value] for row in (ARRIVED, TAKEN, LENGTHS))
        """int32 [NUM_LANES] each."""
        self.most_rows = sizes.stream_bytes // row_bytes
        """Rows that a slot for a stream holds."""
        slots = memory[HEADER.value : sizes.first_message].reshape(NUM_SLOTS.value, -1)
        self._slots = [slot[: self.most_rows * row_bytes].reshape(-1, row_bytes) for slot in slots]
        words = memory[sizes.first_message : sizes.num_bytes].view(np.int32)
        num_words, num_guessed = sizes.num_messages * sizes.message_len, sizes.num_guesses * sizes.guesses_len
        self._messages = words[:num_words].reshape(sizes.num_messages, sizes.message_len)
        guesses = words[num_words : num_words + num_guessed]
        self._guesses = guesses.reshape(sizes.num_guesses, sizes.guesses_len)

    def message(self, number: int) -> Int32Array:
        """Slot of that message of tokens."""
        slot: Int32Array = self._messages[number % len(self._messages)]
        return slot

    def guesses(self, number: int) -> Int32Array:
        """Slot of that message of guesses."""
        slot: Int32Array = self._guesses[number % len(self._guesses)]
        return slot

    def read_stream(self, numbers: Int32Array, rows: UInt8Array) -> None:
        """Fills rows [N, row bytes] with those of a stream. `numbers`: the stream's, of each lane that has rows of
        it."""
        for slot, where in self._parts(numbers, len(rows)):
            rows[where] = slot[where]

    def write_stream(self, numbers: Int32Array, rows: UInt8Array) -> None:
        """Does the opposite of `read_stream`."""
        for slot, where in self._parts(numbers, len(rows)):
            slot[where] = rows[where]

    def _parts(self, numbers: Int32Array, num_rows: int) -> Iterator[tuple[UInt8Array, slice | np.ndarray]]:
        """Each slot and which of its rows belong to the stream: lanes use slots by turns, each on its own."""
        turns = np.resize(numbers & 1, num_rows)
        for turn, slot in enumerate(self._slots):
            is_here = turns == turn
            yield slot[:num_rows], slice(None) if is_here.all() else is_here


class SentStreams:
    """Streams that kernels send to a stage on another host."""

    def __init__(self, own: Piece, behind: Piece, row_bytes: int) -> None:
        self._own, self._behind, self._row_bytes = own, behind, row_bytes
        self._taken: Int32Array = np.zeros(NUM_LANES.value, np.int32)

    def take(self) -> bytes | None:
        """The next stream as a message; None: it has not arrived whole."""
        next_of_first = self._taken[:1] + 1
        # Differences, which are right when both have wrapped.
        if (self._behind.arrived[:1] - next_of_first < 0).any():
            return None
        num_rows = int(self._behind.lengths[next_of_first & 1][0])
        lanes = slice(min(num_rows, NUM_LANES.value))
        numbers = self._taken[lanes] + 1
        if (self._behind.arrived[lanes] - numbers < 0).any():
            return None
        message = np.zeros(len(STREAM) + num_rows * self._row_bytes, np.uint8)
        self._behind.read_stream(numbers, message[len(STREAM) :].reshape(num_rows, self._row_bytes))
        self._taken[lanes] = self._own.taken[lanes] = numbers
        return message.tobytes()


class ReceivedStreams:
    """Streams of a stage on another host, for kernels to receive."""

    def __init__(self, own: Piece, before: Piece, row_bytes: int) -> None:
        self._own, self._before, self._row_bytes = own, before, row_bytes
        self._sent: Int32Array = np.zeros(NUM_LANES.value, np.int32)

    def put(self, stream: bytes | memoryview) -> None:
        """Waits for room. Raises `ValueError` for what is no stream of this engine."""
        num_rows, rest = divmod(len(stream), self._row_bytes)
        if rest or num_rows > self._own.most_rows:
            most = f"at most {self._own.most_rows} rows of {self._row_bytes} bytes"
            raise ValueError(f"a stream has {len(stream)} bytes; allowed: {most}")
        rows = np.frombuffer(stream, np.uint8).reshape(-1, self._row_bytes)
        lanes = slice(min(len(rows), NUM_LANES.value))
        numbers = self._sent[lanes] + 1
        _found(lambda: True if self._has_room(numbers) else None)
        self._own.write_stream(numbers, rows)
        self._sent[lanes] = self._own.arrived[lanes] = numbers

    def _has_room(self, numbers: Int32Array) -> bool:
        """Whether the streams before these are taken in whose slots these belong."""
        return bool((self._before.taken[: len(numbers)] - (numbers - NUM_SLOTS.value) >= 0).all())


class Sender:
    """Sends what kernels write to ranks on other hosts, in the order of their launches.

    NOTE: it looks for what they write, and calls nothing of the device's driver. A call may wait for a launch, which
    may wait for a message of another host, which may wait for one that this sends."""

    def __init__(self, writers: Sequence[Writer], streams: SentStreams | None) -> None:
        self._writers, self._streams = writers, streams
        self._noted: SimpleQueue[Callable[[], bytes | None]] = SimpleQueue()
        """Looks for each message, which find None until it is there."""

    def note_stream(self) -> None:
        """To be called for each launch that sends a stream."""
        assert self._streams is not None
        self._noted.put(self._streams.take)

    def note_message(self, number: int, words: Int32Array) -> None:
        """To be called for each launch that writes a message of that number in these words."""
        self._noted.put(lambda: words.tobytes() if words[0] == number else None)

    def run(self) -> None:
        """Raises `PeerGone`."""
        while True:
            message = _found(self._noted.get())
            for writer in self._writers:
                writer.write(message)


class StageRelay:
    """Relay of one rank of a stage: of its streams, tokens and guesses from and to other hosts. Methods that note
    something are called in the order of launches."""

    def __init__(
        self,
        own: Piece,
        before: Piece | None,
        behind: Piece | None,
        links: StageLinks,
        row_bytes: int,
    ) -> None:
        """`before` and `behind`: pieces of the stages next to this one that are on other hosts. `row_bytes`: those of a
        row of a stream."""
        self._own, self._before, self._links = own, before, links
        self._received = None if before is None else ReceivedStreams(own, before, row_bytes)
        # Guesses of the first stage are in the pieces of all later ones; a later one passes on what has come to it.
        self._guessed = own if links.stream_in is not None else behind
        self._sender: Sender | None = None
        if behind is not None:
            assert links.stream_out is not None
            self._sender = Sender([links.stream_out], SentStreams(own, behind, row_bytes))
        elif links.tokens_out:
            self._sender = Sender(links.tokens_out, None)

    def start(self) -> None:
        """Takes the ends of the rank's links, which no other thread uses from now on."""
        if self._sender is not None:
            _run_thread(self._sender.run)
        if self._received is not None:
            _run_thread(self._receive_streams)
        if self._links.tokens_in is not None:
            _run_thread(self._receive_tokens)

    def note_stream(self) -> None:
        """Notes a launch of layers, which sends a stream unless this is the last stage."""
        if self._sender is not None and not self._links.tokens_out:
            self._sender.note_stream()

    def note_tokens(self, number: int, num_words: int) -> None:
        """Notes a message of the last stage to all others."""
        assert self._sender is not None
        assert self._before is not None
        self._sender.note_message(number, self._before.message(number)[:num_words])

    def note_guesses(self, number: int, num_words: int) -> None:
        """Notes a message of guesses that this stage sends, or receives."""
        if self._sender is not None and not self._links.tokens_out:
            assert self._guessed is not None
            self._sender.note_message(number, self._guessed.guesses(number)[:num_words])

    def _receive_streams(self) -> None:
        assert self._received is not None
        assert self._links.stream_in is not None
        while True:
            message = _next(self._links.stream_in)
            if message[: len(STREAM)] == STREAM:
                self._received.put(memoryview(message)[len(STREAM) :])
            else:
                words = np.frombuffer(message, np.int32)
                _put(self._own.guesses(int(words[0])), words)

    def _receive_tokens(self) -> None:
        assert self._links.tokens_in is not None
        while True:
            words = np.frombuffer(_next(self._links.tokens_in), np.int32)
            _put(self._own.message(int(words[0])), words)


def _next(receiver: Receiver) -> bytes:
    # The rank itself does not wait, which `receive` would say.
    receiver.wait()
    return receiver.receive()


def _put(slot: Int32Array, words: Int32Array) -> None:
    """Leaves a message for a kernel, which awaits its number."""
    slot[1 : len(words)] = words[1:]
    slot[:1] = words[:1]


def _found(look: Callable[[], T | None]) -> T:
    """Looks for what a kernel is going to write until it is there: the sooner again, the shorter it has waited."""
    began = time.perf_counter()
    while (found := look()) is None:
        waited = time.perf_counter() - began
        time.sleep(min(max(waited / 16, LEAST_PAUSE), MOST_PAUSE))
    return found


def _run_thread(work: Callable[[], None]) -> None:
    def run() -> None:
        try:
            work()
        except PeerGone:
            # The executor sees who is gone, and ends this process.
            return
        except BaseException:
            # Kernels would wait in vain for what no thread moves.
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=run, name="stage relay", daemon=True).start()
