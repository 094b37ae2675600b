"""Frames between an engine and a host of one of its stages: a header of kind, channel and length,
then the payload. Decoding never executes code."""

from __future__ import annotations

import struct
from typing import NamedTuple

PIECE, LAST_PIECE, BEAT, LOST, OFFER, ACCEPT, REFUSE, FULL = range(8)
"""Kinds of frames. Of a channel: a piece of a message, and the last piece of one. Of the link: a
heartbeat, the loss of a rank, the offer of a stage, its acceptance or refusal, and that no stage is
missing."""
PIECE_BYTES = 256 << 10
"""Most bytes of a channel's message in one frame."""
OTHER_BYTES = 64 << 10
"""Most bytes of any other frame."""
HEAD = struct.Struct("<BHI")
_PIECES = (PIECE, LAST_PIECE)


class FrameError(Exception):
    """The peer sent what is no frame."""


class Frame(NamedTuple):
    kind: int
    channel: int
    payload: bytes


def head(kind: int, length: int, channel: int = 0) -> bytes:
    return HEAD.pack(kind, channel, length)


def printable(text: str) -> str:
    """Text of another host, made safe for a log."""
    return "".join(each if each.isprintable() else "?" for each in text)


class FrameReader:
    """Frames out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Frame | None:
        """The next frame; None: it is not complete. Raises `FrameError` as soon as its head is
        there."""
        if len(self._buffer) < HEAD.size:
            return None
        kind, channel, length = HEAD.unpack_from(self._buffer)
        if kind > FULL:
            raise FrameError(f"sent a frame of kind {kind}")
        if length > (PIECE_BYTES if kind in _PIECES else OTHER_BYTES):
            raise FrameError(f"sent a frame of {length} bytes")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEAD.size : end])
        del self._buffer[:end]
        return Frame(kind, channel, payload)
