"""Links between pipeline stages: hidden states to the next one, sampled tokens to earlier ones."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..executor import Int32Array
from ..layers.embedding import Embedding
from ..models.model import LastNorm
from ..ring import PeerGone, RingReader, RingWriter
from ..worker_thread import start_worker


class Writer(Protocol):
    """Sends messages to another rank, in their order."""

    def write(self, message: bytes) -> None:
        """Raises `PeerGone`."""


class LaterWriter:
    """Writes messages in a thread, so that nothing waits for room in the ring. The last stage
    answers long streams with
    long messages: where each stage waited until the other reads, both would wait for ever."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.is_gone = False
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        start_worker("stage writer", self._write_all)

    def write(self, message: bytes) -> None:
        """Raises `PeerGone` once the thread has found that."""
        if self.is_gone:
            raise PeerGone
        self._messages.put(message)

    def _write_all(self) -> None:
        try:
            while True:
                self._writer.write(self._messages.get())
        except PeerGone:
            self.is_gone = True


class Receiver:
    """Messages of another rank, in their order."""

    def __init__(self, reader: RingReader, say_waits: Callable[[bool], None]) -> None:
        self._reader = reader
        self._say_waits = say_waits
        self._messages: list[bytes] = []
        self.seconds_waited = 0.0

    def has_message(self) -> bool:
        """Whether `receive` would return at once. Raises `PeerGone`."""
        if not self._messages:
            self._messages += self._reader.read()
        return bool(self._messages)

    def wait(self) -> None:
        """Returns when a message is there, and says nothing of the wait. Raises `PeerGone`."""
        while not self.has_message():
            self._reader.wait()

    def receive(self) -> bytes:
        """Waits for the next message. Raises `PeerGone`."""
        if not self.has_message():
            start = time.perf_counter()
            self._say_waits(True)
            self.wait()
            self._say_waits(False)
            self.seconds_waited += time.perf_counter() - start
        return self._messages.pop(0)


class ReceivedStream(Embedding):
    """In the place of an embedding: the residual stream as the stage before has left it."""

    def __init__(self, receiver: Receiver, hidden_size: int, dtype: torch.dtype) -> None:
        self._receiver = receiver
        self._hidden_size = hidden_size
        self.dtype = dtype
        self.carried: list[torch.Tensor] = []
        """Inputs [T, H] of layers of stages before, which came with the last stream."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        states = received_states(self._receiver, self._hidden_size, self.dtype)
        stream, *self.carried = torch.split(states, len(token_ids))
        assert all(len(each) == len(token_ids) for each in (stream, *self.carried))
        return stream


class StageEnd:
    """In the place of a model's last norm: the residual stream, which the next stage goes on
    with."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum [T, H], rounded as the norm that adds would round it."""
        return residual + x


class StageEnds(Protocol):
    """Layers at the ends of a stage, in the place of layers that other stages have."""

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        """The layer that stands for the embedding in a stage that is not the first."""

    def end(self) -> LastNorm:
        """The layer that stands for the last norm in a stage that is not the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """See `StageEnds`. What this rank hears from the same shard of other stages and says to it; all
    of it is missing where there is one stage."""

    stream_in: Receiver | None = None
    stream_out: RingWriter | None = None
    tokens_in: Receiver | None = None
    tokens_out: Sequence[RingWriter] = ()

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        assert self.stream_in is not None
        return ReceivedStream(self.stream_in, hidden_size, dtype)

    def end(self) -> LastNorm:
        return StageEnd()

    def of_all_stages(self, own: bytes) -> list[bytes]:
        """Bytes of each stage, in their order; all give equally many. Returns when the last stage
        has come here. Before the first plan only: it takes the way of streams and tokens. Raises
        `PeerGone`."""
        given = own if self.stream_in is None else self.stream_in.receive() + own
        if self.stream_out is not None:
            self.stream_out.write(given)
            assert self.tokens_in is not None
            given = self.tokens_in.receive()
        for writer in self.tokens_out:
            writer.write(given)
        return [given[at : at + len(own)] for at in range(0, len(given), len(own))]


def send_states(writer: Writer, *states: torch.Tensor) -> None:
    """Sends tensors [N, H] of one dtype, one behind the other. A ring waits while the other stage
    has no room. Raises `PeerGone`."""
    writer.write(
        b"".join(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in states)
    )


def received_states(receiver: Receiver, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """All rows [N, H] of a message. Raises `PeerGone`."""
    message = bytearray(receiver.receive())
    # Of no bytes torch makes nothing.
    states = torch.frombuffer(message, dtype=dtype) if message else torch.empty(0, dtype=dtype)
    return states.view(-1, hidden_size)


def send_tokens(writers: Sequence[Writer], token_ids: Int32Array, num_tokens: Int32Array) -> None:
    """token_ids [S, n] of which the first num_tokens[j] of row j count."""
    message = np.concatenate([num_tokens, token_ids.ravel()]).astype(np.int32).tobytes()
    for writer in writers:
        writer.write(np.int32(len(num_tokens)).tobytes() + message)


def received_tokens(message: bytes) -> tuple[Int32Array, Int32Array]:
    """token_ids and num_tokens, as they were sent."""
    values = np.frombuffer(message, np.int32)
    count = int(values[0])
    return values[1 + count :].reshape(count, -1), values[1 : 1 + count]
