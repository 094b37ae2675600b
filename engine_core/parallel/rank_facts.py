"""Figures of an executor's ranks. Imports no torch: a process that reads them may have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class RankLost(Exception):
    """A rank of the engine has ended or hangs, and all others were ended with it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}; all ranks of the engine end")
        self.rank = rank
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Counters of one rank."""

    num_plans: int
    busy_seconds: float
    """Time in plans, waits for other ranks included."""
    waited_seconds: float
    """Seconds for which it waited for other ranks."""


@runtime_checkable
class RankedExecutor(Protocol):
    """An executor with ranks, beside the contract of executors."""

    def rank_figures(self) -> list[RankFigures]:
        """Figures of each rank, in their order."""

    def on_rank_lost(self, report: Callable[[RankLost], None]) -> None:
        """Calls `report`, in a thread, as soon as a rank is lost."""
