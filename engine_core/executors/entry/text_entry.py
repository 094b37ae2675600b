"""The words of a step of an encoder: whole texts, which need no request table after their step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...executor import Int32Array, StepPlan
from ...layers.platform import EncoderPlatform
from ...layers.text_batch import TextBatch
from ...ragged import places


@dataclass(frozen=True, slots=True)
class TextStep:
    """Texts of a step, in the order of the plan's rows."""

    plan: StepPlan
    batch: TextBatch


class TextEntry:
    """See `Entry`. A request has its row for one step: all of its tokens are computed there."""

    def __init__(self, platform: EncoderPlatform) -> None:
        self._platform = platform
        self._token_ids: dict[int, Int32Array] = {}
        self._second_starts: dict[int, int] = {}
        """Keyed by row."""

    def send(self, plan: StepPlan) -> TextStep:
        for admitted in plan.admitted:
            self._token_ids[admitted.row] = admitted.token_ids
            self._second_starts[admitted.row] = admitted.sampling.second_start
        texts = [self._token_ids[row][:count] for row, count in _lengths(plan)]
        positions = places(plan.counts)
        batch = TextBatch(
            token_ids=self._sent(np.concatenate(texts)),
            positions=self._sent(positions),
            texts=self._platform.plan_texts(plan.counts.tolist()),
            types=self._types(plan, positions),
        )
        return TextStep(plan, batch)

    def _types(self, plan: StepPlan, positions: Int32Array) -> torch.Tensor | None:
        """Types of tokens; None: all are of the first."""
        starts = np.array([self._second_starts[row] for row in plan.rows.tolist()], np.int32)
        if not starts.any():
            return None
        starts = np.repeat(starts, plan.counts)
        return self._sent((starts > 0) & (positions >= starts))

    def _sent(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._platform.device)

    def take(self, sent: TextStep) -> TextBatch:
        return sent.batch


def _lengths(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, tokens) of each text. Texts are computed whole: tokens see those after them."""
    assert not plan.starts.any()
    return list(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
