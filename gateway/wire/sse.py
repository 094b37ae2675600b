"""Server-sent events as bytes. Knows nothing about the contents of events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from .body_stream import Headers

EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def keep_alive(wait_seconds: float = 0.0) -> bytes:
    """A comment that keeps a stream open, with the estimated seconds until its model is awake,
    where it sleeps."""
    if not wait_seconds:
        return KEEP_ALIVE
    return b": the model is asleep; awake in about %d s\n\n" % math.ceil(wait_seconds)


def typed_event(event: Mapping[str, Any]) -> bytes:
    """An event that is named by its `type`."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"
