"""Tokens that the last pipeline stage has sampled, on their way to the others' tables: launches
only."""

from __future__ import annotations

from typing import Protocol

import torch

from headwater.kernels.stage.stage_memory import LAST_TOKENS, StageMemory
from headwater.kernels.stage.stage_stream import MOST_NUMBERS, send_ends, send_tokens

from ..table.device_table import DeviceTable


class MessageNumbers:
    """Sequence numbers of messages from one stage to the others: from 1 on, and again from 1 when
    the slots wrap around."""

    def __init__(self, num_slots: int) -> None:
        self._number = 0
        self._most = MOST_NUMBERS - MOST_NUMBERS % num_slots

    def next(self) -> int:
        self._number = self._number % self._most + 1
        return self._number


class TokenChannel(Protocol):
    """Carries messages between this stage's memory and that of stages on other hosts."""

    def send(self, number: int, num_words: int) -> None:
        """Sends message `number`, of so many words, which the last launch writes."""

    def receive(self, number: int, num_words: int) -> None:
        """Receives message `number`, of so many words, which the next launch reads."""


class NoTokenChannel:
    """See `TokenChannel`: all stages are on this host, where launches reach one another's
    memory."""

    def send(self, number: int, num_words: int) -> None:
        pass

    def receive(self, number: int, num_words: int) -> None:
        pass


def words_of_tokens(num_tokens: int) -> int:
    """Words of a message of sampled tokens: its number; rows, positions and tokens."""
    return 1 + 3 * num_tokens


def words_of_ends(num_rows: int) -> int:
    """Words of a message of ends of rows: its number; rows, lengths and last tokens."""
    return 1 + (2 + LAST_TOKENS) * num_rows


class TokenSender:
    """Sends the other stages what the last one has sampled."""

    def __init__(self, memory: StageMemory, table: DeviceTable, channel: TokenChannel) -> None:
        self._memory = memory
        self._table = table
        self._channel = channel
        self._numbers = MessageNumbers(memory.sizes.num_messages)

    def send(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Sends the tokens int32 [S] at positions of table rows."""
        number = self._numbers.next()
        send_tokens(self._memory, number, rows, positions, token_ids)
        self._channel.send(number, words_of_tokens(len(rows)))

    def send_ends(self, rows: torch.Tensor) -> None:
        """Sends the lengths of table rows int32 [R] after a step after which the device alone knows
        them."""
        number = self._numbers.next()
        send_ends(self._memory, number, rows, self._table.known, self._table.token_ids)
        self._channel.send(number, words_of_ends(len(rows)))

    def rehearse(self) -> None:
        """Launches both kinds of messages, of padding, while launches are recorded, not
        executed."""
        padding = torch.full(
            (min(4, self._memory.sizes.most_rows),),
            -1,
            dtype=torch.int32,
            device=self._table.known.device,
        )
        send_tokens(self._memory, 1, padding, padding, padding)
        send_ends(self._memory, 1, padding, self._table.known, self._table.token_ids)


class NoTokenSender:
    """See `TokenSender`, for an engine with one stage."""

    def send(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        pass

    def send_ends(self, rows: torch.Tensor) -> None:
        pass

    def rehearse(self) -> None:
        pass
