"""Messages of a pipeline stage on a GPU to and from stages on other hosts. Kernels write and await them in host memory
as if the other stages were here; threads of the rank's process move them between that memory and the rank's rings."""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from headwater.kernels.stage_memory import ARRIVED, HEADER, LENGTHS, NUM_LANES, NUM_SLOTS, TAKEN, StageSizes

from ..executor import Int32Array, UInt8Array
from ..ring import PeerGone
from .stage_link import Receiver, StageLinks, Writer


class Passed(Protocol):
    """Event behind launches, which the device passes when all of them have ended; see `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> object: ...


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
        num_words = sizes.num_messages * sizes.message_len
        self._messages = words[:num_words].reshape(sizes.num_messages, sizes.message_len)

    def message(self, number: int) -> Int32Array:
        """Slot of that message of tokens."""
        slot: Int32Array = self._messages[number % len(self._messages)]
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


class Launches:
    """Events behind launches, in their order. One thread notes them, another one waits."""

    def __init__(self, record: Callable[[], Passed]) -> None:
        self._record = record
        self._events: deque[Passed] = deque()
        self._is_there = threading.Condition()

    def note(self) -> None:
        event = self._record()
        with self._is_there:
            self._events.append(event)
            self._is_there.notify()

    def forget_passed(self) -> None:
        while self._events and self._events[0].query():
            self._events.popleft()

    def wait(self) -> None:
        """Returns when the device has passed the first event that is left, which may not be noted yet."""
        with self._is_there:
            self._is_there.wait_for(lambda: self._events)
            event = self._events.popleft()
        event.synchronize()


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
        message = np.zeros(num_rows * self._row_bytes, np.uint8)
        self._behind.read_stream(numbers, message.reshape(num_rows, self._row_bytes))
        self._taken[lanes] = self._own.taken[lanes] = numbers
        return message.tobytes()


class ReceivedStreams:
    """Streams of a stage on another host, for kernels to receive."""

    def __init__(self, own: Piece, before: Piece, row_bytes: int, launched: Launches) -> None:
        """`launched`: launches that receive streams."""
        self._own, self._before, self._row_bytes, self._launched = own, before, row_bytes, launched
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
        self._launched.forget_passed()
        while (self._before.taken[lanes] - (numbers - NUM_SLOTS.value) < 0).any():
            self._launched.wait()
        self._own.write_stream(numbers, rows)
        self._sent[lanes] = self._own.arrived[lanes] = numbers


class Sender:
    """Sends what kernels have written to ranks on other hosts, in the order in which it is noted."""

    def __init__(self, writers: Sequence[Writer], streams: SentStreams | None, record: Callable[[], Passed]) -> None:
        self._writers, self._streams, self._record = writers, streams, record
        self._noted: SimpleQueue[tuple[Passed, Int32Array | None]] = SimpleQueue()

    def note(self, words: Int32Array | None) -> None:
        """To be called behind the launch that writes a message of these words; None: behind one that sends streams."""
        self._noted.put((self._record(), words))

    def run(self) -> None:
        """Raises `PeerGone`."""
        while True:
            passed, words = self._noted.get()
            # What is there already waits for no call of the device's driver, which may wait for a launch in its turn.
            self._send_streams()
            passed.synchronize()
            if words is None:
                self._send_streams()
            else:
                self._write(words.tobytes())

    def _send_streams(self) -> None:
        while self._streams is not None and (stream := self._streams.take()) is not None:
            self._write(stream)

    def _write(self, message: bytes) -> None:
        for writer in self._writers:
            writer.write(message)


class StageRelay:
    """Relay of one rank of a stage: of its streams and tokens from and to other hosts. Methods that note
    something are called behind the launch of it, on its stream of launches."""

    def __init__(
        self,
        own: Piece,
        before: Piece | None,
        behind: Piece | None,
        links: StageLinks,
        row_bytes: int,
        record: Callable[[], Passed],
    ) -> None:
        """`before` and `behind`: pieces of the stages next to this one that are on other hosts. `row_bytes`: those of a
        row of a stream. `record`: records an event on the current stream of launches."""
        self._own, self._before, self._links = own, before, links
        self._launched = Launches(record)
        self._received = None if before is None else ReceivedStreams(own, before, row_bytes, self._launched)
        self._sender: Sender | None = None
        if behind is not None:
            assert links.stream_out is not None
            self._sender = Sender([links.stream_out], SentStreams(own, behind, row_bytes), record)
        elif links.tokens_out:
            self._sender = Sender(links.tokens_out, None, record)

    def start(self) -> None:
        """Takes the ends of the rank's links, which no other thread uses from now on."""
        if self._sender is not None:
            _run_thread(self._sender.run)
        if self._received is not None:
            _run_thread(self._receive_streams)
        if self._links.tokens_in is not None:
            _run_thread(self._receive_tokens)

    def note_streams(self) -> None:
        """Notes launches that receive at most two streams and send as many: more would wait for what is noted here."""
        if self._received is not None:
            self._launched.note()
        if self._sender is not None and not self._links.tokens_out:
            self._sender.note(None)

    def note_tokens(self, number: int, num_words: int) -> None:
        """Notes a message of the last stage to all others."""
        assert self._sender is not None
        assert self._before is not None
        self._sender.note(self._before.message(number)[:num_words])

    def _receive_streams(self) -> None:
        assert self._received is not None
        assert self._links.stream_in is not None
        while True:
            self._received.put(_next(self._links.stream_in))

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
