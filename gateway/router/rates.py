"""How fast replicas are: the mean of what equal ones say, since what one alone learns is noise
between equals.

Replicas are equal when their numerics id is: same weights, device, kernels, layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.services.runtime.member import ReplicaLoad

DEFAULT_PREFILL_TPS = 2000.0
"""Prompt tokens a second before a replica of the model has reported any. It is used for a moment,
so that only its relation to the other parts of the cost matters."""


@dataclass(frozen=True, slots=True)
class Rates:
    prefill_tps: float = DEFAULT_PREFILL_TPS
    """Prompt tokens a second."""
    itl_base: float = 0.0
    """Seconds of a decode step without a row; 0 while unknown, as below."""
    itl_per_request: float = 0.0

    def itl(self, batch: int) -> float:
        return self.itl_base + self.itl_per_request * batch


def pooled(loads: Iterable[ReplicaLoad]) -> Rates:
    """The mean over the replicas that report the value."""
    known = list(loads)
    speeds = [load.prefill_tps for load in known if load.prefill_tps > 0]
    steps = [load for load in known if load.itl_seconds > 0]
    slopes = [load.itl_seconds_per_request for load in steps if load.itl_seconds_per_request > 0]
    slope = sum(slopes) / len(slopes) if slopes else 0.0
    bases = [max(0.0, load.itl_seconds - slope * max(load.num_running, 1)) for load in steps]
    return Rates(
        prefill_tps=sum(speeds) / len(speeds) if speeds else DEFAULT_PREFILL_TPS,
        itl_base=sum(bases) / len(bases) if bases else 0.0,
        itl_per_request=slope,
    )
