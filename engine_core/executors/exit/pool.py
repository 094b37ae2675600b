"""The end of a step of an encoder: a vector of each text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headwater.kernels.launch.device import download, upload
from headwater.kernels.norm.span_means import span_means_twin

from ...executor import NO_RESULT, DrawPlan, StepPlan, StepResult
from ...layers.platform import EncoderPlatform, PoolingPlatform
from ...models.encoders.encoder import Encoder
from ..entry.text_entry import TextStep

SPARSE = "sparse"
BY_TOKEN = ("token", SPARSE)


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
        texts = self._texts(sent.plan)
        pooled = [row for row in rows if self._poolings[row] not in BY_TOKEN]
        parts = {row: self._by_token(row, hidden, *texts[row]) for row in rows if row not in pooled}
        if pooled:
            spans = np.array([self._span(row, *texts[row]) for row in pooled], np.int32)
            means = self._means(hidden, upload(spans, hidden.device))
            vectors = download(self._encoder.dense(means))
            parts |= dict(zip(pooled, vectors, strict=True))

        def read() -> StepResult:
            return StepResult(
                token_ids=NO_RESULT.token_ids,
                num_tokens=NO_RESULT.num_tokens,
                embeddings={row: parts[row].numpy().tobytes() for row in rows},
            )

        return read

    def draw(self, plan: DrawPlan) -> Callable[[], StepResult]:
        raise AssertionError("an encoder samples no tokens")

    def close(self) -> None:
        pass

    def _texts(self, plan: StepPlan) -> dict[int, tuple[int, int]]:
        """(first token, number of tokens) of each row's text."""
        firsts = (np.cumsum(plan.counts) - plan.counts).tolist()
        return dict(
            zip(plan.rows.tolist(), zip(firsts, plan.counts.tolist(), strict=True), strict=True)
        )

    def _span(self, row: int, first: int, count: int) -> tuple[int, int]:
        """First token and number of tokens whose states' mean is the vector of a row."""
        match self._poolings[row]:
            case "cls":
                return first, 1
            case "last":
                return first + count - 1, 1
            case _:
                return first, count

    def _by_token(self, row: int, hidden: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """float32 [count, N] vectors, or [count] weights, of a row's tokens."""
        states = hidden[first : first + count]
        if self._poolings[row] == SPARSE:
            return download(self._encoder.dense.token_weights(states))
        return download(self._encoder.dense.token_vectors(states))
