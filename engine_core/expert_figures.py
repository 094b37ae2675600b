"""Figures of a model's mixtures of experts. Imports no torch: a process that reads them may have
none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ExpertFigures:
    """Rows by expert so far, and what a step read."""

    num_rows: list[int]
    """Number of rows of each expert, over all layers."""
    largest_shares: list[float]
    """Share of the rows of each layer with experts that its most chosen expert has, 0 to 1."""
    num_read: int
    """Experts that one recent step read, over all layers."""
    num_bytes_read: int
    """Bytes of their weights, as they are stored."""


@runtime_checkable
class ExpertExecutor(Protocol):
    """An executor that counts, beside the contract of executors."""

    def expert_figures(self) -> ExpertFigures | None:
        """Figures of experts so far; None: the model has no experts, or none was counted yet."""
