"""Tokens that the last pipeline stage has sampled, on their way to the others' tables: launches
only."""

from __future__ import annotations

from typing import Protocol

import torch

from headwater.kernels.stage.stage_memory import LAST_TOKENS, StageMemory
from headwater.kernels.stage.stage_stream import MOST_NUMBERS, send_ends, send_tokens

from ..table.device_table import DeviceTable


class MessageNumbers:
    """Numbers of messages, which one stage sends and the others receive in one order: from 1 on,
    and again from 1 where the slots begin anew."""

    def __init__(self, num_slots: int) -> None:
        self._number = 0
        self._most = MOST_NUMBERS - MOST_NUMBERS % num_slots

    def next(self) -> int:
        self._number = self._number % self._most + 1
        return self._number


class TokenRelay(Protocol):
    """Moves messages to stages on other hosts."""

    def note_tokens(self, number: int, num_words: int) -> None:
        """Notes the launch of message `number`, of so many words."""


class TokenSender:
    """Sends the other stages what the last one has sampled."""

    def __init__(self, memory: StageMemory, table: DeviceTable, relay: TokenRelay) -> None:
        self._memory = memory
        self._table = table
        self._relay = relay
        self._numbers = MessageNumbers(memory.sizes.num_messages)

    def send(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Tokens int32 [S] behind positions of table rows."""
        number = self._numbers.next()
        send_tokens(self._memory, number, rows, positions, token_ids)
        self._relay.note_tokens(number, 1 + 3 * len(rows))

    def send_ends(self, rows: torch.Tensor) -> None:
        """How far table rows int32 [R] came in a step after which the device alone knows it."""
        number = self._numbers.next()
        send_ends(self._memory, number, rows, self._table.known, self._table.token_ids)
        self._relay.note_tokens(number, 1 + (2 + LAST_TOKENS) * len(rows))

    def rehearse(self) -> None:
        """Launches both kinds of messages, of padding, where nothing is really launched."""
        padding = torch.full(
            (min(4, self._memory.sizes.most_rows),),
            -1,
            dtype=torch.int32,
            device=self._table.known.device,
        )
        send_tokens(self._memory, 1, padding, padding, padding)
        send_ends(self._memory, 1, padding, self._table.known, self._table.token_ids)


class NoTokenSender:
    """See `TokenSender`, where there is one stage."""

    def send(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        pass

    def send_ends(self, rows: torch.Tensor) -> None:
        pass

    def rehearse(self) -> None:
        pass
