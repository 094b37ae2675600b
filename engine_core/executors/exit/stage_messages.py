"""Messages between pipeline stages that compute at once: residual streams and sampled tokens. Both
sides know the size of each message from the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ...executor import Int32Array


class Sender(Protocol):
    """Sends tensors to another rank, in their order."""

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous tensor. The caller must not write to it afterwards, except by later
        launches on a GPU. Raises `PeerGone`."""


class Receiver(Protocol):
    """Receives tensors of another rank, in their order."""

    def post(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Has the next tensor received into this one, which is contiguous and has as many bytes.
        The result has this thread, or later launches on a GPU, wait for it, and is called in the
        order of posts. Both raise `PeerGone`."""


class NoStage:
    """Sender and receiver where there is no stage on that side."""

    def send(self, tensor: torch.Tensor) -> None:
        pass

    def post(self, tensor: torch.Tensor) -> Callable[[], object]:
        return _received


NO_STAGE = NoStage()


def _received() -> None:
    pass


def send_tokens(senders: Sequence[Sender], token_ids: Int32Array, num_tokens: Int32Array) -> None:
    """token_ids [S, n] of which the first num_tokens[j] of row j count."""
    if not senders:
        return
    message = torch.from_numpy(np.column_stack([num_tokens, token_ids]).astype(np.int32))
    for sender in senders:
        sender.send(message)


class ReceivedTokens:
    """Tokens that the last stage samples after `num_positions` [S] of each row."""

    def __init__(self, receiver: Receiver, num_positions: Int32Array) -> None:
        self._message = torch.empty(
            len(num_positions), 1 + int(num_positions.max()), dtype=torch.int32
        )
        self._wait = receiver.post(self._message)

    def take(self) -> tuple[Int32Array, Int32Array]:
        """Waits for them. Returns token_ids [S, n], of which the first num_tokens [S] of each row
        count. Raises `PeerGone`."""
        self._wait()
        values: Int32Array = self._message.numpy()
        return values[:, 1:], values[:, 0]
