"""A stream of numbered events, which a client can resume behind the last one that it has.

Events that the client has are left out. Nothing is merged: the events depend on the answer alone,
not on how fast it is read. Events that the socket does not take wait in order, and the tokens'
credit with them.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.proto.output_processor_pb2 import RowParts

from ..request.choice import Choice, Sink
from ..stages.output_session import Scores
from ..wire.body_stream import BodyStream
from ..wire.sse import KEEP_ALIVE


class NumberedStream:
    """Target of a sink in place of a `BodyStream`; `after` is the number of the last event that the
    client has."""

    blocked = False
    """Always False: the writer is not blocked but asked to hold back credit."""

    def __init__(
        self, open_stream: Callable[[Callable[[], None]], BodyStream], after: int = 0
    ) -> None:
        self._out = open_stream(self._on_writable)
        self._after = after
        self._number = 0
        self._waiting: list[Choice] = []

    @property
    def started(self) -> bool:
        return self._out.started

    @property
    def num_events(self) -> int:
        return self._out.num_events

    def opened_by(self, on_writable: Callable[[], None]) -> NumberedStream:
        """Returns this stream. `on_writable` is never called: the sink buffers nothing."""
        return self

    def begin(self) -> None:
        """Begins the response."""
        self._out.write(KEEP_ALIVE)

    def write(self, data: bytes) -> None:
        if data.startswith(b":"):
            if not self._out.blocked:
                self._out.write(data)
        elif numbered := self.numbered(data):
            self._out.write(numbered)

    def numbered(self, data: bytes) -> bytes:
        """Adds numbers to events, and leaves out those that the client has."""
        events = []
        # JSON has no empty lines.
        for event in data.split(b"\n\n")[:-1]:
            self._number += 1
            if self._number > self._after:
                events.append(b"id: %d\n%b\n\n" % (self._number, event))
        return b"".join(events)

    def hold_back(self, choice: Choice) -> None:
        """Gives the engine no more credit for a choice while the socket takes nothing."""
        if self._out.blocked and not choice.is_held_back:
            choice.is_held_back = True
            self._waiting.append(choice)

    def _on_writable(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for choice in waiting:
            choice.is_held_back = False
            choice.taken(0)


class NumberedSink:
    """A sink whose events go to a numbered stream."""

    def __init__(self, sink: Sink, out: NumberedStream) -> None:
        self._sink = sink
        self._out = out

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        self._out.hold_back(choice)
        return self._sink.piece(choice, text, token_ids, logprobs, parts)

    def ended(self, choice: Choice) -> None:
        self._sink.ended(choice)
