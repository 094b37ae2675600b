"""KV blocks that are in the caches of the device alone, or that are copied when no step runs."""

from __future__ import annotations

from ...executor import StepPlan


class NoTiers:
    """See `Tiers`: no copy runs beside a step."""

    def precede(self, plan: StepPlan) -> None:
        pass

    def rehearse(self) -> None:
        pass

    def close(self) -> None:
        pass
