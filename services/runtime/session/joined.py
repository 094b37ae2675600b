"""Number of messages that share a frame: writing a frame costs more than a short message does."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message


def num_joined(messages: Sequence[Message], most_bytes: int) -> int:
    """Number of leading messages that fit into one frame of `most_bytes` bytes: at least one, if
    there is any."""
    if len(messages) < 2:
        return len(messages)
    num_bytes = 0
    for count, message in enumerate(messages):
        # NOTE: ByteSize encodes the message.
        num_bytes += message.ByteSize()
        if num_bytes > most_bytes:
            return max(count, 1)
    return len(messages)
