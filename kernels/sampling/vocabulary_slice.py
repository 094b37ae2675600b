"""Slices of a vocabulary that ranks have the logits of, and the ways in which ranks combine what
they find in theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..peer.peer_memory import PeerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The logits are of successive tokens; slices of the ranks, in their order, make up the
    vocabulary."""

    memory: PeerMemory
    first_token: int
    vocab_size: int
    """Number of tokens of all ranks."""


@dataclass(frozen=True, slots=True)
class SliceArguments:
    """Arguments of a kernel that reads logits: those of a slice or, without one, of all tokens."""

    part: VocabularySlice | None
    logits: torch.Tensor

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Addresses of the ranks' memory and numbers of meetings. A kernel of one rank reads
        nothing of them."""
        return (
            (self.logits, self.logits)
            if self.part is None
            else (self.part.memory.bases, self.part.memory.numbers)
        )

    @property
    def place(self) -> tuple[int, int, int, int]:
        """First token, index of the rank, bytes of a slot, and most polls."""
        if self.part is None:
            return 0, 0, 0, 0
        memory = self.part.memory
        return self.part.first_token, memory.index, memory.slot_bytes, memory.max_polls

    @property
    def num_ranks(self) -> int:
        return 1 if self.part is None else self.part.memory.size

    @property
    def constants(self) -> dict[str, Any]:
        is_host = self.part is not None and self.part.memory.is_host
        return {"SIZE": self.num_ranks, "HOST": is_host, "ON_GPU": self.logits.is_cuda}

    def grid(self, num_rows: int) -> tuple[int]:
        return (num_rows,) if self.part is None else self.part.memory.grid(num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSlice:
    """Like `VocabularySlice`, for ranks on a CPU, which join small tensors."""

    first_token: int
    vocab_size: int
    join: Callable[[torch.Tensor], torch.Tensor]
    """Joins x [R, N] of each rank to [R, ranks * N], side by side in the order of the ranks."""

    @classmethod
    def whole(cls, vocab_size: int) -> JoinedSlice:
        """Slice of one process: all tokens."""
        return cls(first_token=0, vocab_size=vocab_size, join=_alone)

    def is_whole(self, logits: torch.Tensor) -> bool:
        return logits.shape[1] == self.vocab_size

    def highest(self, x: torch.Tensor) -> torch.Tensor:
        """The highest x [R, N] of all ranks in each column, [R, N]."""
        rows, width = x.shape
        return self.join(x).view(rows, -1, width).amax(1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of the ranks' whole numbers [R, N], int64 [R, N]."""
        rows, width = x.shape
        return self.join(x).view(rows, -1, width).sum(1)

    def likeliest(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest logits of all ranks, float32 [R, count] in descending order, and their tokens
        int32. Where there are fewer, minus infinity fills the row. Which of the equals of the last
        one come is left open."""
        rows, num_tokens = logits.shape
        own = logits.topk(min(num_tokens, count), dim=1)
        values = torch.full((rows, count), -torch.inf)
        ids = torch.zeros((rows, count), dtype=torch.int32)
        values[:, : own.values.shape[1]] = own.values
        ids[:, : own.values.shape[1]] = own.indices + self.first_token
        if self.is_whole(logits):
            return values, ids
        joined = self.join(torch.cat((values.view(torch.int32), ids), dim=1)).view(
            rows, -1, 2, count
        )
        all_values = joined[:, :, 0].flatten(1).view(torch.float32)
        best = all_values.topk(count, dim=1)
        return best.values, joined[:, :, 1].flatten(1).gather(1, best.indices)


def _alone(x: torch.Tensor) -> torch.Tensor:
    return x
