"""Chooses the number of drafted tokens of each row that a step computes, for most accepted tokens a
second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.kernels.cpu.drafts import length_chooser, standing

from ..executor import Int32Array
from .step_costs import StepCosts

Float64Array = npt.NDArray[np.float64]


class Choice(NamedTuple):
    num_drafts: Int32Array
    """[R]"""
    gain: float
    """Tokens a second with these drafts over tokens a second without any, with steps planned
    ahead."""


def expected(
    acceptance: Float64Array, num_offered: Int32Array, most: int, found: Float64Array | None = None
) -> Float64Array:
    """Probability [R, most] that a row's i-th draft is accepted: that it exists (`found`; None:
    always), and that it and all before it are accepted, each with the row's probability; 0 after
    the offered drafts."""
    stands = np.empty((acceptance.size, most))
    found = np.ones(acceptance.size) if found is None else found
    standing()(found, np.ascontiguousarray(acceptance), np.ascontiguousarray(num_offered), stands)
    return stands


def choose(stands: Float64Array, costs: StepCosts, num_rows: int, most_drafts: int) -> Choice:
    """Chooses draft lengths for rows whose i-th draft is accepted with probability stands[r, i],
    descending along a row, in a step of `num_rows` rows in all and up to `most_drafts` drafts. Only
    numbers of drafts are compared that fill a measured step size, or that take all useful
    drafts."""
    num_drafts = np.empty(len(stands), np.int32)
    gain = np.empty(1)
    length_chooser()(
        stands, costs.sizes, costs.seconds, costs.gap, num_rows, most_drafts, num_drafts, gain
    )
    return Choice(num_drafts, float(gain[0]))
