"""Messages between pipeline stages that compute at once: residual streams and sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...executor import Int32Array


class Writer(Protocol):
    """Sends messages to another rank, in their order."""

    def write(self, message: bytes) -> None:
        """Raises `PeerGone`."""


class Messages(Protocol):
    """Messages of another rank, in their order."""

    def has_message(self) -> bool:
        """Whether `receive` would return at once. Raises `PeerGone`."""

    def receive(self) -> bytes:
        """Waits for the next message. Raises `PeerGone`."""


def send_stream(writer: Writer, stream: torch.Tensor) -> None:
    """Sends the residual stream [T, H]. A ring waits while the other stage has no room. Raises
    `PeerGone`."""
    writer.write(stream.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def send_tokens(writers: Sequence[Writer], token_ids: Int32Array, num_tokens: Int32Array) -> None:
    """token_ids [S, n] of which the first num_tokens[j] of row j count."""
    if not writers:
        return
    message = np.concatenate([num_tokens, token_ids.ravel()]).astype(np.int32).tobytes()
    for writer in writers:
        writer.write(np.int32(len(num_tokens)).tobytes() + message)


def received_tokens(message: bytes) -> tuple[Int32Array, Int32Array]:
    """token_ids and num_tokens, as they were sent."""
    values = np.frombuffer(message, np.int32)
    count = int(values[0])
    return values[1 + count :].reshape(count, -1), values[1 : 1 + count]
