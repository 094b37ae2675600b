"""The words of a step of an encoder: whole texts, which need no request table behind their step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...executor import Int32Array, StepPlan
from ...layers.text_batch import TextBatch
from ...ragged import places


@dataclass(frozen=True, slots=True)
class TextStep:
    """Texts of a step, in the order of the plan's rows."""

    plan: StepPlan
    batch: TextBatch


class TextEntry:
    """See `Entry`. A request has its row for one step: all of its tokens are computed there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._token_ids: dict[int, Int32Array] = {}
        """By row."""

    def send(self, plan: StepPlan) -> TextStep:
        for admitted in plan.admitted:
            self._token_ids[admitted.row] = admitted.token_ids
        texts = [self._token_ids[row][:count] for row, count in _lengths(plan)]
        batch = TextBatch(
            token_ids=torch.from_numpy(np.concatenate(texts).astype(np.int64)).to(self._device),
            positions=torch.from_numpy(places(plan.counts).astype(np.int64)).to(self._device),
            counts=plan.counts,
        )
        return TextStep(plan, batch)

    def take(self, sent: TextStep) -> TextBatch:
        return sent.batch


def _lengths(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, tokens) of each text. Texts are computed whole: tokens see those behind them."""
    assert not plan.starts.any()
    return list(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
