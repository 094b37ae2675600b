"""Frames of HTTP/2 that a client sends, on their way to gRPC. Reads their heads alone.

gRPC (1.85) holds a client to the settings that it announced once the client has acknowledged them.
Until then a header counts as long as it likes: 450,000 references of one byte to one header became
as many Python objects, which held the interpreter for 0.4 s. Here gRPC gets an acknowledgement
before the first call, and the client's own is dropped.
"""

from __future__ import annotations

import struct

PREFACE_BYTES = 24
"""Length of the text that a connection begins with (RFC 9113, 3.4)."""
FRAME_HEAD_BYTES = 9
HEADERS = 1
SETTINGS = 4
CONTINUATION = 9
ACK = 1
ACKNOWLEDGEMENT = bytes((0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0))
"""Frame that acknowledges settings."""


MAX_CONCURRENT_STREAMS = 3
SETTING = struct.Struct(">HI")
"""One setting: what it is, and its value."""


class HeadTooLong(Exception):
    """A client sent more bytes of one call's head than are allowed."""


class ClientFrames:
    """Frames of one connection. NOTE: what is acknowledged for the client may not change how it
    writes heads, so that the size of the table of headers stays at HTTP/2's default."""

    def __init__(self, max_head_bytes: int) -> None:
        """`max_head_bytes` bounds a head as it is encoded, with the heads of its frames."""
        self._max_head_bytes = max_head_bytes
        self._head_bytes = 0
        """Bytes of the call's head that comes at present."""
        self._num_left = PREFACE_BYTES
        """Bytes that are left of the preface, or of a frame."""
        self._partial = b""
        """Begin of a frame's head."""
        self._num_frames = 0
        self.has_acknowledged = False
        """Whether the client has acknowledged the first settings."""

    def forwarded(self, data: bytes) -> bytes:
        """Bytes that go to gRPC for the client's next bytes. Raises `HeadTooLong`."""
        if self._partial:
            data = self._partial + data
        out = []
        begin = 0
        at = min(self._num_left, len(data))
        self._num_left -= at
        while len(data) - at >= FRAME_HEAD_BYTES:
            length = int.from_bytes(data[at : at + 3], "big")
            kind = data[at + 3]
            flags = data[at + 4]
            self._check_head(kind, FRAME_HEAD_BYTES + length)
            is_acknowledgement = kind == SETTINGS and bool(flags & ACK) and not length
            if self._num_frames == 1:
                # Behind the client's settings, which come first.
                out += [data[begin:at], ACKNOWLEDGEMENT]
                begin = at
            self._num_frames += 1
            if is_acknowledgement and not self.has_acknowledged:
                self.has_acknowledged = True
                out.append(data[begin:at])
                begin = at + FRAME_HEAD_BYTES
            end = at + FRAME_HEAD_BYTES + length
            at = min(end, len(data))
            self._num_left = end - at
        self._partial = data[at:]
        out.append(data[begin:at])
        return b"".join(out)

    def _check_head(self, kind: int, num_bytes: int) -> None:
        """Counts a frame of a call's head. Raises `HeadTooLong`."""
        if kind == HEADERS:
            self._head_bytes = num_bytes
        elif kind == CONTINUATION:
            self._head_bytes += num_bytes
        else:
            return
        if self._head_bytes > self._max_head_bytes:
            raise HeadTooLong


def with_max_streams(data: bytes, number: int) -> bytes:
    """The first bytes that gRPC sends, with another number of calls that its client may have open.
    They begin with its settings."""
    end = FRAME_HEAD_BYTES + int.from_bytes(data[:3], "big")
    settings = (
        SETTING.pack(kind, number if kind == MAX_CONCURRENT_STREAMS else value)
        for kind, value in SETTING.iter_unpack(data[FRAME_HEAD_BYTES:end])
    )
    return data[:FRAME_HEAD_BYTES] + b"".join(settings) + data[end:]
