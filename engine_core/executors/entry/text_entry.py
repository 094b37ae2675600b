"""The words of a step of an encoder: whole texts, which need no request table after their step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.kernels.launch.device import upload

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
    """See `Entry`. A request has its row for one step, which computes all of its tokens."""

    def __init__(self, platform: EncoderPlatform) -> None:
        self._platform = platform
        self._token_ids: dict[int, Int32Array] = {}
        self._attended_lens: dict[int, int] = {}
        self._second_starts: dict[int, int] = {}
        """Keyed by row."""

    def send(self, plan: StepPlan) -> TextStep:
        for admitted in plan.admitted:
            self._token_ids[admitted.row] = admitted.token_ids
            self._attended_lens[admitted.row] = admitted.sampling.attended_len
            self._second_starts[admitted.row] = admitted.sampling.second_start
        texts = [self._token_ids[row][:count] for row, count in _lengths(plan)]
        positions = places(plan.counts)
        words = [np.concatenate(texts), positions, *self._types(plan, positions)]
        # One asynchronous copy.
        token_ids, sent_positions, *types = upload(np.stack(words), self._platform.device).long()
        batch = TextBatch(
            token_ids=token_ids,
            positions=sent_positions,
            texts=self._platform.plan_texts(plan.counts.tolist(), *self._attended(plan)),
            types=types[0] if types else None,
        )
        return TextStep(plan, batch)

    def _attended(self, plan: StepPlan) -> list[list[int]]:
        """Numbers of tokens that each text's tokens attend to; none: all."""
        lens = [self._attended_lens[row] for row in plan.rows.tolist()]
        if not any(lens):
            return []
        pairs = zip(lens, plan.counts.tolist(), strict=True)
        return [[min(given or count, count) for given, count in pairs]]

    def _types(self, plan: StepPlan, positions: Int32Array) -> list[Int32Array]:
        """Types of tokens; none: all are of the first."""
        starts = np.array([self._second_starts[row] for row in plan.rows.tolist()], np.int32)
        if not starts.any():
            return []
        starts = np.repeat(starts, plan.counts)
        return [((starts > 0) & (positions >= starts)).astype(np.int32)]

    def take(self, sent: TextStep) -> TextBatch:
        return sent.batch


def _lengths(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, tokens) of each text. Texts are computed whole: tokens see those after them."""
    assert not plan.starts.any()
    return list(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
