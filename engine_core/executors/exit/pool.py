"""The end of a step of an encoder: a vector of each text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headwater.kernels.launch.device import download, upload
from headwater.kernels.norm.span_means import span_means_twin

from ...executor import NO_RESULT, DrawPlan, Int32Array, StepPlan, StepResult
from ...layers.platform import EncoderPlatform, PoolingPlatform
from ...models.encoders.encoder import Encoder
from ..entry.text_entry import TextStep


class Pool:
    """See `Exit`. Steps that warm an engine up compute texts of no request, which have no
    pooling."""

    def __init__(self, encoder: Encoder, platform: EncoderPlatform) -> None:
        self._encoder = encoder
        self._means = (
            platform.span_means if isinstance(platform, PoolingPlatform) else span_means_twin
        )
        self._poolings: dict[int, str] = {}
        """Keyed by row of the request table."""

    def precede(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._poolings[admitted.row] = admitted.sampling.pooling

    def give(self, sent: TextStep, hidden: torch.Tensor) -> Callable[[], StepResult]:
        rows = sent.plan.pooled_rows
        if not rows:
            return lambda: NO_RESULT
        spans = upload(self._spans(sent.plan), hidden.device)
        vectors = download(self._encoder.dense(self._means(hidden, spans)))

        def read() -> StepResult:
            found = vectors.numpy()
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

    def _spans(self, plan: StepPlan) -> Int32Array:
        """[rows, 2] first token and number of tokens whose states are the vector of a pooled row,
        by their mean, in the order of the pooled rows."""
        ends = np.cumsum(plan.counts).tolist()
        texts = zip(plan.rows.tolist(), ends, plan.counts.tolist(), strict=True)
        spans = {row: self._span(row, end, count) for row, end, count in texts}
        return np.array([spans[row] for row in plan.pooled_rows], np.int32)

    def _span(self, row: int, end: int, count: int) -> tuple[int, int]:
        match self._poolings[row]:
            case "cls":
                return end - count, 1
            case "last":
                return end - 1, 1
            case _:
                return end - count, count
