"""How many drafted tokens of each row a step computes: those that bring most accepted tokens a second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.executor import Int32Array

Float64Array = npt.NDArray[np.float64]


class Choice(NamedTuple):
    num_drafts: Int32Array
    """[R]"""
    gain: float
    """Tokens a second with these drafts over tokens a second without any, with steps planned ahead."""


def expected(acceptance: Float64Array, num_offered: Int32Array, most: int) -> Float64Array:
    """[R, most] the probability that a row's i-th draft stands: that it and all before it are accepted, each with the
    row's probability; 0 behind what is offered."""
    powers: Float64Array = acceptance[:, None] ** np.arange(1, most + 1)
    return np.where(np.arange(most) < num_offered[:, None], powers, 0.0)


def choose(stands: Float64Array, costs: StepCosts, num_rows: int, most_drafts: int) -> Choice:
    """Lengths for rows whose i-th draft stands with probability stands[r, i], descending along a row, in a step of
    `num_rows` rows, these among them, and up to `most_drafts` drafts. Only numbers of drafts are compared that fill a
    measured size of a step, or take all that can stand."""
    by_value = np.sort(stands, axis=None)[::-1]
    num_useful = min(int(np.count_nonzero(by_value)), most_drafts)
    nothing = Choice(np.zeros(len(stands), np.int32), 1.0)
    if not num_useful:
        return nothing
    totals = costs.sizes[costs.sizes > num_rows] - num_rows
    totals = np.append(totals[totals < num_useful], num_useful)
    gained = np.cumsum(by_value[:num_useful])[totals - 1] + num_rows
    rates = gained / (costs.of(num_rows + totals) + costs.gap)
    best = int(np.argmax(rates))
    gain = float(rates[best] * costs.of(num_rows) / num_rows)
    if gain <= 1.0:
        return nothing
    least, total = by_value[totals[best] - 1], int(totals[best])
    counts = np.count_nonzero(stands > least, axis=1)
    # Of those that are worth as much as the last that fits, the first rows' fit.
    equal = np.count_nonzero(stands == least, axis=1)
    room = total - int(counts.sum())
    counts += np.clip(room - (np.cumsum(equal) - equal), 0, equal)
    return Choice(counts.astype(np.int32), gain)
