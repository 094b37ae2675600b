"""The rings of one rank: to and from the executor, and between its stage and others."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..system.ring import RingEnd, create_ring
from .stage_rings import StageRings


@dataclass(slots=True)
class RankRings:
    """Ring ends of one rank, or the ends opposite to them."""

    plans: RingEnd
    reports: RingEnd
    stages: StageRings = field(default_factory=StageRings)
    """Rings between stages; empty where stages are on several hosts."""

    @property
    def ends(self) -> list[RingEnd]:
        """Ends of the rings of plans and reports, and of those between stages."""
        return [self.plans, self.reports, *self.stages.ends]

    def close(self) -> None:
        for end in self.ends:
            end.close()


def create_rank_rings() -> tuple[RankRings, RankRings]:
    """New rings of a rank whose executor is on another host: the rank's ends, and the opposite
    ones."""
    plan_writer, plan_reader = create_ring()
    report_writer, report_reader = create_ring()
    return RankRings(plan_reader, report_writer), RankRings(plan_writer, report_reader)
