"""The end of a step of an encoder: a vector of each text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...executor import NO_RESULT, DrawPlan, Int32Array, StepPlan, StepResult
from ...models.encoders.encoder import Encoder
from ..entry.text_entry import TextStep


class Pool:
    """See `Exit`. Steps that warm an engine up compute texts of no request, which have no
    pooling."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._poolings: dict[int, str] = {}
        """Keyed by row of the request table."""

    def precede(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._poolings[admitted.row] = admitted.sampling.pooling

    def give(self, sent: TextStep, hidden: torch.Tensor) -> Callable[[], StepResult]:
        rows = sent.plan.pooled_rows
        if not rows:
            return lambda: NO_RESULT
        vectors = self._encoder.dense(self._pooled(sent.plan, hidden))

        def read() -> StepResult:
            found = vectors.cpu().numpy()
            return StepResult(
                token_ids=NO_RESULT.token_ids,
                num_tokens=NO_RESULT.num_tokens,
                embeddings={row: found[i].tobytes() for i, row in enumerate(rows)},
            )

        return read

    def draw(self, plan: DrawPlan) -> Callable[[], StepResult]:
        raise AssertionError("an encoder samples no tokens")

    def close(self) -> None:
        pass

    def _pooled(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of whole texts → float32 [rows, H] of the pooled rows, in their
        order."""
        ends: Int32Array = np.cumsum(plan.counts)
        spans = {
            row: (int(end) - int(count), int(end))
            for row, end, count in zip(plan.rows.tolist(), ends, plan.counts, strict=True)
        }
        states = (
            _pooled_text(hidden[slice(*spans[row])], self._poolings[row])
            for row in plan.pooled_rows
        )
        return torch.stack(list(states))


def _pooled_text(states: torch.Tensor, pooling: str) -> torch.Tensor:
    """States [T, H] of a text → float32 [H]."""
    match pooling:
        case "cls":
            return states[0].float()
        case "last":
            return states[-1].float()
        case _:
            return states.float().mean(0)
