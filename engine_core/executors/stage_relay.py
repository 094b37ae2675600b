"""Messages of a pipeline stage on a GPU to and from stages on other hosts. Kernels write and await
them in host memory as if the other stages were here; threads of the rank's process move them
between that memory and the rank's rings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from headwater.kernels.stage_memory import NUM_LANES, NUM_SLOTS

from ..executor import Int32Array
from ..ring import PeerGone
from ..worker_thread import start_worker
from .stage_link import Receiver, StageLinks, Writer
from .stage_pieces import Piece, StatePiece, lanes_of

STREAM = bytes(4)
"""First word of a stream in a ring. That of hidden states is -1 - channel; that of other messages
is their number, from 1 on."""
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
        row_bytes = self._behind.streams.row_bytes
        message = np.zeros(len(STREAM) + num_rows * row_bytes, np.uint8)
        self._behind.streams.read(numbers, message[len(STREAM) :].reshape(num_rows, row_bytes))
        self._taken[lanes] = self._own.taken[lanes] = numbers
        return message.tobytes()


class ReceivedStreams:
    """Streams of a stage on another host, for kernels to receive."""

    def __init__(self, own: Piece, before: Piece) -> None:
        self._own = own
        self._before = before
        self._sent: Int32Array = np.zeros(NUM_LANES.value, np.int32)

    def put(self, stream: bytes | memoryview) -> None:
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


class RelayedStates:
    """Hidden states of all channels in this host's memory. Kernels of this host and messages of
    another one leave them there; kernels of the first stage take them, or they go on to the next
    host.

    NOTE: a tensor that comes finds its slot free. The first stage has received what the slot held
    before it sends the stream of the step that the tensor belongs to."""

    def __init__(self, piece: StatePiece, channels: Sequence[int]) -> None:
        """`channels`: those that go on to another host."""
        self._piece = piece
        self._channels = channels
        self._taken, self._put = (np.zeros_like(piece.arrived) for _ in range(2))

    def take(self, channel: int, num_rows: int) -> bytes | None:
        """The channel's next tensor of that many rows as a message; None: it has not arrived
        whole."""
        piece = self._piece
        lanes = lanes_of(num_rows)
        numbers = self._taken[channel, lanes] + 1
        if (piece.arrived[channel, lanes] - numbers < 0).any():
            return None
        slots = piece.slots[channel]
        rows = np.empty((num_rows, slots.row_bytes), np.uint8)
        slots.read(numbers, rows)
        self._taken[channel, lanes] = numbers
        return np.int32(-1 - channel).tobytes() + rows.tobytes()

    def put(self, channel: int, states: bytes | memoryview) -> None:
        """Leaves a tensor for kernels, or for `take`. Raises `ValueError` for a channel or a size
        that there is not."""
        piece = self._piece
        if channel >= len(piece.slots):
            raise ValueError(
                f"a channel of hidden states is {channel}; allowed: at most {len(piece.slots) - 1}"
            )
        rows = piece.slots[channel].rows_of(states)
        lanes = lanes_of(len(rows))
        numbers = self._put[channel, lanes] + 1
        if channel in self._channels:
            assert (
                numbers - self._taken[channel, lanes] <= piece.slots[channel].num_slots
            ).all(), "a slot is not free"
        piece.slots[channel].write(numbers, rows)
        self._put[channel, lanes] = piece.arrived[channel, lanes] = numbers


class Sender:
    """Sends what kernels write to ranks on other hosts, in the order of their launches.

    NOTE: it looks for what they write, and calls nothing of the device's driver. A call may wait
    for a launch, which may wait for a message of another host, which may wait for one that this
    sends."""

    def __init__(self) -> None:
        self._noted: SimpleQueue[tuple[Callable[[], bytes | None], Sequence[Writer]]] = (
            SimpleQueue()
        )

    def note(self, look: Callable[[], bytes | None], writers: Sequence[Writer]) -> None:
        """To be called for each launch that writes a message, which `look` finds; None until it is
        there."""
        self._noted.put((look, writers))

    def note_message(self, number: int, words: Int32Array, writers: Sequence[Writer]) -> None:
        """As `note`, of a message of that number in these words."""
        self.note(lambda: words.tobytes() if words[0] == number else None, writers)

    def run(self) -> None:
        """Raises `PeerGone`."""
        while True:
            look, writers = self._noted.get()
            message = _found(look)
            for writer in writers:
                writer.write(message)


class StageRelay:
    """Relay of one rank of a stage: of its streams, tokens, guesses and hidden states from and to
    other hosts. Methods that note something are called in the order of launches."""

    def __init__(
        self,
        own: Piece,
        before: Piece | None,
        behind: Piece | None,
        links: StageLinks,
        *,
        states: StatePiece | None = None,
        channels: Sequence[int] = (),
    ) -> None:
        """`before` and `behind`: pieces of the stages next to this one that are on other hosts.
        `states`: where this host has what the first stage is shown; `channels`: those that come
        from this stage and from others between the first stage's host and it."""
        self._own = own
        self._before = before
        self._links = links
        self._received = None if before is None else ReceivedStreams(own, before)
        # Guesses of the first stage are in the pieces of all later ones; a later one passes on what
        # has come to it.
        self._guessed = own if links.stream_in is not None else behind
        self._sent = None if behind is None else SentStreams(own, behind)
        self._states = None if states is None else RelayedStates(states, channels)
        self._channels = channels
        self._sender = Sender() if behind is not None or links.tokens_out else None

    def start(self) -> None:
        """Takes the ends of the rank's links, which no other thread uses from now on."""
        if self._sender is not None:
            _run_thread(self._sender.run)
        if self._received is not None:
            _run_thread(self._receive_streams)
        if self._links.tokens_in is not None:
            _run_thread(self._receive_tokens)

    def note_layers(self, num_shown: int) -> None:
        """Notes a launch of layers, which sends a stream unless this is the last stage.
        `num_shown`: its tokens whose hidden states the first stage is shown."""
        if self._sender is None:
            return
        if self._sent is not None:
            assert self._links.stream_out is not None
            self._sender.note(self._sent.take, [self._links.stream_out])
        for channel in self._channels if num_shown else ():
            assert self._states is not None
            self._sender.note(partial(self._states.take, channel, num_shown), self._states_out)

    def note_tokens(self, number: int, num_words: int) -> None:
        """Notes a message of the last stage to all others."""
        assert self._sender is not None
        assert self._before is not None
        self._sender.note_message(
            number, self._before.message(number)[:num_words], self._links.tokens_out
        )

    def note_guesses(self, number: int, num_words: int) -> None:
        """Notes a message of guesses that this stage sends, or receives."""
        if self._sender is not None and self._links.stream_out is not None:
            assert self._guessed is not None
            self._sender.note_message(
                number, self._guessed.guesses(number)[:num_words], [self._links.stream_out]
            )

    @property
    def _states_out(self) -> Sequence[Writer]:
        """Where hidden states go: from the last stage to the first one, from others to the next."""
        return (
            self._links.tokens_out[:1]
            if self._links.stream_out is None
            else [self._links.stream_out]
        )

    def _receive_streams(self) -> None:
        assert self._received is not None
        assert self._links.stream_in is not None
        while True:
            message = _next(self._links.stream_in)
            if message[: len(STREAM)] == STREAM:
                self._received.put(memoryview(message)[len(STREAM) :])
            else:
                self._leave(message, self._own.guesses)

    def _receive_tokens(self) -> None:
        assert self._links.tokens_in is not None
        while True:
            self._leave(_next(self._links.tokens_in), self._own.message)

    def _leave(self, message: bytes, slot_of: Callable[[int], Int32Array]) -> None:
        """Leaves hidden states, or words whose number a kernel awaits, where kernels look for
        them."""
        number = int.from_bytes(message[: len(STREAM)], "little", signed=True)
        if number < 0:
            assert self._states is not None
            self._states.put(-1 - number, memoryview(message)[len(STREAM) :])
            return
        words = np.frombuffer(message, np.int32)
        slot = slot_of(number)
        slot[1 : len(words)] = words[1:]
        slot[:1] = words[:1]


def _next(receiver: Receiver) -> bytes:
    # The rank itself does not wait, which `receive` would say.
    receiver.wait()
    return receiver.receive()


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
