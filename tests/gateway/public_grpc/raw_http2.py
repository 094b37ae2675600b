"""HTTP/2 as bytes, for what no client library sends."""

from __future__ import annotations

import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = 1
CONTINUATION = 9
SETTINGS = 4
ACK = 1
HEADER_TABLE_SIZE = 1
MAX_CONCURRENT_STREAMS = 3
MAX_HEADER_LIST_SIZE = 6
END_HEADERS = 4
FIRST_ENTRY = b"\xbe"
"""Reference to the header that was put into the connection's table last."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes, *, is_kept: bool = False) -> bytes:
    """A header as it is; `is_kept`: it is put into the connection's table."""
    return (b"\x40" if is_kept else b"\x00") + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    rest = len(text)
    if rest < 127:
        return bytes([rest]) + text
    out = b"\x7f"
    rest -= 127
    while rest >= 128:
        out += bytes([rest % 128 + 128])
        rest //= 128
    return out + bytes([rest]) + text


def call_head(path: str) -> bytes:
    """Headers of a call over gRPC. The first two bytes are `:method: POST` and `:scheme: http`."""
    named = {b":path": path.encode(), b":authority": b"localhost", b"te": b"trailers"}
    named[b"content-type"] = b"application/grpc"
    return b"\x83\x86" + b"".join(literal(name, value) for name, value in named.items())


class RawConnection:
    """A connection that reads whole frames."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._bytes = self._socket.makefile("rb")
        self.send(PREFACE + frame(SETTINGS, 0, 0, b""))

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self) -> tuple[int, int, bytes]:
        """Kind, stream and payload of the next frame. Raises `EOFError` at the connection's end."""
        head = self._bytes.read(9)
        if len(head) < 9:
            raise EOFError
        num_bytes = int.from_bytes(head[:3], "big")
        return head[3], int.from_bytes(head[5:], "big"), self._bytes.read(num_bytes)

    def read_to_end(self) -> set[int]:
        """Reads until the server ends the connection. Returns the streams of the frames."""
        streams = set[int]()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                streams.add(self.read()[1])
        return streams
