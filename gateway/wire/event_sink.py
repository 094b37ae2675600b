"""Sink that writes the events of an answer of one choice, as `/v1/responses` and `/v1/messages`
have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headwater.proto.output_processor_pb2 import RowParts

from ..request.choice import Choice
from ..request.sinks import Held, Piece
from ..stages.output_session import Scores


class EventOutput(Protocol):
    """Stream that takes events."""

    @property
    def blocked(self) -> bool:
        """Whether the client takes nothing for now."""
        ...

    @property
    def num_events(self) -> int: ...

    def write(self, data: bytes) -> None: ...


class EventSink:
    """Writes events while the client takes them. Holds and merges pieces while it does not.

    A subclass renders events in its `_opening`, `_events_of` and `_ending`.
    """

    silence: bytes
    """Sent where nothing else was."""

    def __init__(self, open_stream: Callable[[Callable[[], None]], EventOutput]) -> None:
        self._held = Held()
        self.out = open_stream(self._flush)
        self._num_at_tick = 0

    def piece(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        logprobs: Scores,
        parts: RowParts | None,
    ) -> bool:
        self._held.add(choice, text, token_ids, logprobs, parts)
        if not self.out.blocked:
            self._flush()
        return False

    def ended(self, choice: Choice) -> None:
        self._write(self._opening() + self._held_events() + self._ending(choice))

    def keep_alive(self) -> None:
        """Writes `silence`, if nothing was written since the last call."""
        if self.out.num_events == self._num_at_tick and not self.out.blocked:
            self._write(self._opening())
            self.out.write(self.silence)
        self._num_at_tick = self.out.num_events

    def _opening(self) -> bytes:
        """Events before all others, at the first call."""
        raise NotImplementedError

    def _events_of(self, piece: Piece) -> bytes:
        raise NotImplementedError

    def _ending(self, choice: Choice) -> bytes:
        """Events behind the last piece."""
        raise NotImplementedError

    def _held_events(self) -> bytes:
        """Takes all held events."""
        events = b""
        while (piece := self._held.pop()) is not None:
            events += self._events_of(piece)
        return events

    def _flush(self) -> None:
        """Writes what was held, merged: the client takes more."""
        while not self.out.blocked and (piece := self._held.pop()) is not None:
            self._write(self._opening() + self._events_of(piece))

    def _write(self, events: bytes) -> None:
        if events:
            self.out.write(events)
