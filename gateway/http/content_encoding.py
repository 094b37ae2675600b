"""Encodings of bodies: gzip and deflate of requests, undone piece by piece, and gzip of answers."""

from __future__ import annotations

import gzip
import io
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from headwater.services.runtime import errors

MIN_BYTES = 1024
"""Answers up to this size stay as they are: they fit into a packet or two."""
LEVEL = 4
THREAD_BYTES = 64 * 1024
"""Smallest size of an answer that a thread compresses; smaller ones take less than a millisecond.
"""
MAX_PADDING = 100
MAX_ACCEPT_CHARS = 1024
"""Characters of `Accept-Encoding` that are read; clients send some thirty."""
PIECE_BYTES = 128 * 1024
"""The most that is decoded before the limit is looked at again and others get a turn."""
_WITH_GZIP_HEADER = 31
_WITH_ZLIB_HEADER = 15
_RAW = -15
"""`wbits` of zlib."""


class UnsupportedEncoding(errors.UnsupportedMediaType):
    """A request's body in an encoding that is not undone here."""

    code = "unsupported_content_encoding"
    param = "content-encoding"

    def __init__(self, encoding: str) -> None:
        message = f"content-encoding is {encoding[:80]!r}; allowed: gzip, deflate, or none"
        super(errors.UnsupportedMediaType, self).__init__(message)


class BodyDecoder:
    """One request's body. Holds no more of it than a piece, whatever a small body would become."""

    def __init__(self, encoding: str) -> None:
        """Raises `UnsupportedEncoding`, also for one encoding within another."""
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise UnsupportedEncoding(encoding)
        self._encoding = encoding
        self._head = b""
        self._zlib = None if encoding == "deflate" else zlib.decompressobj(_WITH_GZIP_HEADER)

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Decodes the next chunk of the body. Raises `BadRequest` where the chunk is not in the
        body's encoding."""
        data = self._head + chunk
        if self._zlib is None and len(data) < 2:
            self._head = data
            return
        self._head = b""
        if self._zlib is None:
            self._zlib = zlib.decompressobj(_WITH_ZLIB_HEADER if _has_zlib_header(data) else _RAW)
        yield from self._decoded(self._zlib, data)

    def end(self) -> Iterator[bytes]:
        """The rest. Raises `BadRequest` for a body that was cut off."""
        if self._zlib is not None:
            yield from self._decoded(self._zlib, b"")
        if self._zlib is None or not self._zlib.eof:
            raise self._broken("it is cut off")

    def _decoded(self, stream: zlib._Decompress, data: bytes) -> Iterator[bytes]:
        while not stream.eof:
            try:
                piece = stream.decompress(data, PIECE_BYTES)
            except zlib.error as fault:
                raise self._broken(str(fault)) from None
            data = stream.unconsumed_tail
            if piece:
                yield piece
            elif not (data or stream.eof):
                return
        # NOTE: another member of gzip behind the first one would be legal. A body of thousands of
        # empty ones costs quadratic time, and no client sends several.
        if data or stream.unused_data:
            raise self._broken("more follows behind its end")

    def _broken(self, why: str) -> errors.BadRequest:
        return errors.BadRequest(
            "content-encoding", f"the body is not valid {self._encoding}: {why}"
        )


def _has_zlib_header(data: bytes) -> bool:
    """Whether it is zlib's format (RFC 1950), as `deflate` means; some clients send what is inside
    of it alone."""
    return data[0] & 0x0F == 8 and int.from_bytes(data[:2]) % 31 == 0


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a client's `Accept-Encoding` allows gzip."""
    weights: dict[str, float] = {}
    for entry in accept_encoding[:MAX_ACCEPT_CHARS].lower().split(","):
        name, _, parameters = entry.partition(";")
        weights[name.strip()] = _weight(parameters)
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _weight(parameters: str) -> float:
    name, _, value = parameters.partition("=")
    try:
        return float(value) if name.strip() == "q" else 1.0
    except ValueError:
        return 0.0


async def compressed(
    body: bytes,
    accept_encoding: str,
    native: Callable[[int, Callable[[], bytes]], Awaitable[bytes]],
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """An answer, compressed if that makes it smaller and the client accepts it, and the headers
    that say so. `native`: runs work on that many bytes in a thread."""
    if len(body) <= MIN_BYTES:
        return body, []
    vary = (b"vary", b"accept-encoding")
    if not takes_gzip(accept_encoding):
        return body, [vary]
    compress = partial(gzipped, body)
    smaller = compress() if len(body) < THREAD_BYTES else await native(len(body), compress)
    if len(smaller) >= len(body):
        return body, [vary]
    return smaller, [vary, (b"content-encoding", b"gzip")]


def gzipped(body: bytes) -> bytes:
    """The body, with a file name of random length in its head: the size alone tells less of what
    stands beside a text that somebody else chose (BREACH; as Django does,
    https://ieeexplore.ieee.org/document/9754554)."""
    out = io.BytesIO()
    name = "a" * secrets.randbelow(MAX_PADDING + 1)
    with gzip.GzipFile(filename=name, mode="wb", compresslevel=LEVEL, fileobj=out, mtime=0) as file:
        file.write(body)
    return out.getvalue()
