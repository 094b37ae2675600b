"""Controls of running streams by the calling end: cancels, credit, probes. They overtake requests
that wait to be sent.

Knows no stream's state.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from google.protobuf.internal.containers import (
    RepeatedCompositeFieldContainer,
    RepeatedScalarFieldContainer,
)

from headwater.proto.engine_pb2 import Cancel, Credit

MAX_ITEMS = 1024
"""Largest number of cancels, of credits and of probes in one frame."""


class ControlFrame(Protocol):
    """A frame that has room for them."""

    @property
    def cancels(self) -> RepeatedCompositeFieldContainer[Cancel]: ...
    @property
    def credits(self) -> RepeatedCompositeFieldContainer[Credit]: ...
    @property
    def probed(self) -> RepeatedScalarFieldContainer[int]: ...


class Controls:
    """Waiting controls, by stream; credits of a stream are added up."""

    def __init__(self) -> None:
        self._cancels: deque[Cancel] = deque()
        self._credits: dict[int, int] = {}
        self._probes: dict[int, None] = {}

    def __bool__(self) -> bool:
        """Whether any control waits."""
        return bool(self._cancels or self._credits or self._probes)

    def cancel(self, cancel: Cancel) -> None:
        """Ends a stream at the other end; no other control of it is sent."""
        self.forget(cancel.stream_id)
        self._cancels.append(cancel)

    def grant(self, stream_id: int, tokens: int) -> None:
        """Gives room for more tokens."""
        self._credits[stream_id] = self._credits.get(stream_id, 0) + tokens

    def probe(self, stream_id: int) -> None:
        """Makes the other end report if it does not have the stream."""
        self._probes[stream_id] = None

    def forget(self, stream_id: int) -> None:
        """Drops the controls of a stream that has ended: its id may become another's."""
        self._credits.pop(stream_id, None)
        self._probes.pop(stream_id, None)

    def clear(self) -> None:
        """Drops all controls: the session is over."""
        self._cancels.clear()
        self._credits.clear()
        self._probes.clear()

    def put_into(self, frame: ControlFrame) -> None:
        """Moves as many controls as a frame may have into it."""
        frame.cancels.extend(
            self._cancels.popleft() for _ in range(min(MAX_ITEMS, len(self._cancels)))
        )
        for stream_id in list(islice(self._credits, MAX_ITEMS)):
            frame.credits.add(stream_id=stream_id, tokens=self._credits.pop(stream_id))
        for stream_id in list(islice(self._probes, MAX_ITEMS)):
            del self._probes[stream_id]
            frame.probed.append(stream_id)
