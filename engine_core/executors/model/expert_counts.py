"""Counts of rows by expert, which kernels add up on the device, and what a step added to them.

Two copies a period are enough, one behind a step and one behind the next: a step waits for none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...expert_figures import ExpertFigures
from ...models.layered import LayeredModel
from ...models.model import Model

PERIOD_SECONDS = 0.5


class NoExpertCounts:
    """The counts of a model without experts."""

    def note_step(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def figures(self) -> ExpertFigures | None:
        return None


class AtOnce:
    """The event behind copies that are made where they are asked for."""

    def query(self) -> bool:
        return True


AT_ONCE = AtOnce()


class ExpertCounts:
    def __init__(
        self,
        counts: torch.Tensor,
        num_bytes: list[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """counts int64 [layers, experts], of layers with experts or zeros; `num_bytes` by layer: of
        one expert."""
        self._counts = counts
        self._num_bytes = torch.tensor(num_bytes)
        self._clock = clock
        self._copies = [
            torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
            for _ in range(2)
        ]
        self._num_copied = 0
        self._is_copied: torch.cuda.Event | AtOnce = AT_ONCE
        self._copied_at = -PERIOD_SECONDS
        self._figures: ExpertFigures | None = None

    def note_step(self) -> None:
        """Copies the counts of a step; called after its launches."""
        if self._num_copied == 2:
            return
        if not self._num_copied and self._clock() - self._copied_at < PERIOD_SECONDS:
            return
        self._copies[self._num_copied].copy_(self._counts, non_blocking=True)
        self._num_copied += 1
        if self._num_copied == 2 and self._counts.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
            event.record()
            self._is_copied = event

    def forget(self) -> None:
        """Counts from zero: steps so far were of no request."""
        self._counts.zero_()
        self._num_copied = 0
        self._figures = None

    def figures(self) -> ExpertFigures | None:
        """The newest figures; None: no two steps have been counted."""
        if self._num_copied == 2 and self._is_copied.query():
            self._figures = self._made_of(*self._copies)
            self._num_copied = 0
            self._copied_at = self._clock()
        return self._figures

    def _made_of(self, before: torch.Tensor, behind: torch.Tensor) -> ExpertFigures:
        num_read = (behind > before).sum(1)
        is_counted = behind.sum(1) > 0
        shares = behind.max(1).values[is_counted].double() / behind.sum(1)[is_counted]
        return ExpertFigures(
            num_rows=behind.sum(0).tolist(),
            largest_shares=shares.tolist(),
            num_read=int(num_read.sum()),
            num_bytes_read=int((num_read * self._num_bytes).sum()),
        )


def expert_counts_of(model: Model) -> ExpertCounts | NoExpertCounts:
    """The counts of a model's layers, which its pass adds to."""
    if not isinstance(model, LayeredModel) or model.expert_counts is None:
        return NoExpertCounts()
    return ExpertCounts(model.expert_counts, model.expert_bytes)
