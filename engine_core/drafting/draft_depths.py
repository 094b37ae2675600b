"""Chooses the number of tokens that a draft model drafts for each row of a step: one pass over all
drafted rows for each token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .draft_lengths import Choice
from .step_costs import StepCosts

Float64Array = npt.NDArray[np.float64]


def choose_depth(
    stands: Float64Array, costs: StepCosts, pass_costs: StepCosts, num_rows: int, most_drafts: int
) -> Choice:
    """Chooses draft lengths for rows whose i-th draft is accepted with probability stands[r, i],
    descending along a row, in a step of `num_rows` rows in all and up to `most_drafts` drafts.
    `pass_costs`: costs of a pass of the draft model, by rows; their gap is the extra time of a step
    with any drafts. A draft whose expected gain is below the cost of its position is left out; the
    number of passes is the one with the most tokens a second."""
    plain = float(costs.of(num_rows))
    position = (float(costs.of(num_rows + len(stands))) - plain) / len(stands)
    is_worth = stands * plain > position * num_rows
    counts = np.count_nonzero(is_worth, axis=0)
    num_drafts = np.cumsum(counts)
    tokens = num_rows + np.cumsum(np.where(is_worth, stands, 0.0).sum(axis=0))
    seconds = costs.of(num_rows + num_drafts) + pass_costs.gap + np.cumsum(pass_costs.of(counts))
    gains = np.where(num_drafts <= most_drafts, tokens / seconds, 0.0) * plain / num_rows
    depth = int(gains.argmax())
    if gains[depth] <= 1.0:
        return Choice(np.zeros(len(stands), np.int32), 1.0)
    return Choice(
        np.count_nonzero(is_worth[:, : depth + 1], axis=1).astype(np.int32), float(gains[depth])
    )
