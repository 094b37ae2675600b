"""The rings of one rank: to and from the executor, and between its stage and others."""

from __future__ import annotations

from dataclasses import dataclass

from ..system.ring import RingEnd, create_ring
from ..weights.shards import ParallelLayout
from .stage_rings import StageRings


@dataclass(slots=True)
class RankRings:
    """One end of each ring: those that the rank has, or those opposite to them."""

    plans: RingEnd
    reports: RingEnd
    stages: StageRings

    @property
    def downward(self) -> list[RingEnd | None]:
        """Rings that the rank reads."""
        return [self.plans, self.stages.stream_in, self.stages.tokens_in]

    @property
    def upward(self) -> list[RingEnd | None]:
        """Rings that the rank writes."""
        return [self.reports, self.stages.stream_out, *self.stages.tokens_out]

    @property
    def ends(self) -> list[RingEnd]:
        """All that are there."""
        return [end for end in (*self.downward, *self.upward) if end is not None]

    def close(self) -> None:
        for end in self.ends:
            end.close()


def create_rank_rings(layout: ParallelLayout, rank: int) -> tuple[RankRings, RankRings]:
    """New rings of a rank whose other stages are elsewhere: its ends, and the opposite ones."""
    own = StageRings()
    opposite = StageRings()
    stage = layout.stage_index(rank)
    last = layout.pipeline - 1
    if stage > 0:
        opposite.stream_in, own.stream_in = create_ring()
    if stage < last:
        own.stream_out, opposite.stream_out = create_ring()
        opposite.tokens_in, own.tokens_in = create_ring()
    elif last:
        for _ in range(last):
            writer, reader = create_ring()
            own.tokens_out.append(writer)
            opposite.tokens_out.append(reader)
    plan_writer, plan_reader = create_ring()
    report_writer, report_reader = create_ring()
    return RankRings(plan_reader, report_writer, own), RankRings(
        plan_writer, report_reader, opposite
    )
