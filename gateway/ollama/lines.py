"""JSON lines, the form of streams in Ollama's API, and times as that API writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from ..wire.body_stream import Headers

JSON_LINES: Headers = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def line(content: dict[str, Any]) -> bytes:
    return _encode(content) + b"\n"


def written_time(seconds: float) -> str:
    """Time, in seconds since 1970, in the form of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float | None) -> int:
    """A duration, at least one nanosecond, since clients divide by it."""
    return max(1, round((seconds or 0.0) * 1e9))
