"""Measured time of a decode step by the number of positions that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..executor import Int32Array

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepCosts:
    """Costs of steps, linear between two measured numbers of positions."""

    sizes: Int32Array
    """Numbers of positions, ascending."""
    seconds: Float64Array
    """Time of a step of so many positions, with the next one launched after it; not descending."""
    gap: float = 0.0
    """Seconds that a step takes longer when the next one is planned from its result."""
    is_steady: bool = True
    """Whether a step took about as long each time that it was measured."""

    @classmethod
    def measured(
        cls,
        sizes: Sequence[int],
        seconds: Sequence[float],
        gap: float = 0.0,
        *,
        is_steady: bool = True,
    ) -> StepCosts:
        """Costs from measurements. A step costs at most what one of more positions took: what else
        a machine does makes measured times longer, never shorter. A step of more positions than
        were measured takes longer in proportion."""
        smooth = np.minimum.accumulate(np.array(seconds, np.float64)[::-1])[::-1].copy()
        return cls(np.array(sizes, np.int32), smooth, max(gap, 0.0), is_steady)

    @cached_property
    def without_gap(self) -> StepCosts:
        """Costs of steps that are planned ahead of their results."""
        return replace(self, gap=0.0)

    def of(self, num_positions: npt.ArrayLike) -> Float64Array:
        """Seconds of steps of so many positions."""
        counts = np.asarray(num_positions)
        seconds: Float64Array = np.interp(counts, self.sizes, self.seconds) * np.maximum(
            counts / self.sizes[-1], 1.0
        )
        return seconds
