"""Links between pipeline stages: hidden states to the next one, sampled tokens to earlier ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...layers.embedding import Embedding
from ...models.model import LastNorm
from ...parallel.stage_rings import StageRings
from ...system.ring import RingEnd, RingReader, RingWriter


class Receiver:
    """Messages of another rank, in their order."""

    def __init__(self, reader: RingReader, note_waiting: Callable[[bool], None]) -> None:
        self._reader = reader
        self._note_waiting = note_waiting
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
            self._note_waiting(True)
            self.wait()
            self._note_waiting(False)
            self.seconds_waited += time.perf_counter() - start
        return self._messages.pop(0)


class ReceivedStream(Embedding):
    """In the place of an embedding: the residual stream as the stage before has left it."""

    def __init__(self, receiver: Receiver, hidden_size: int, dtype: torch.dtype) -> None:
        self._receiver = receiver
        self._hidden_size = hidden_size
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        message = bytearray(self._receiver.receive())
        stream = torch.frombuffer(message, dtype=self.dtype).view(-1, self._hidden_size)
        assert len(stream) == len(token_ids)
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

    @classmethod
    def over(cls, rings: StageRings, note_waiting: Callable[[bool], None]) -> StageLinks:
        """`note_waiting` is called with whether a receiver waits."""

        def receiver(end: RingEnd | None) -> Receiver | None:
            return None if end is None else Receiver(RingReader(end), note_waiting)

        return cls(
            stream_in=receiver(rings.stream_in),
            stream_out=None if rings.stream_out is None else RingWriter(rings.stream_out),
            tokens_in=receiver(rings.tokens_in),
            tokens_out=[RingWriter(end) for end in rings.tokens_out],
        )

    @property
    def seconds_waited(self) -> float:
        """Seconds in which messages of other stages were awaited."""
        receivers = (self.stream_in, self.tokens_in)
        return sum(each.seconds_waited for each in receivers if each is not None)

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
