"""The rings between pipeline stages: for each shard a chain from stage to stage, and one back from
the last stage to each of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..system.ring import RingEnd, create_ring
from ..weights.shards import ParallelLayout


@dataclass(slots=True)
class StageRings:
    """The ring ends of one rank."""

    stream_in: RingEnd | None = None
    """Ring from the same shard of the stage before."""
    stream_out: RingEnd | None = None
    """Ring to the next stage."""
    tokens_in: RingEnd | None = None
    """Ring from the last stage."""
    tokens_out: list[RingEnd] = field(default_factory=list)
    """Rings from the last stage to each earlier stage, in their order."""

    @property
    def ends(self) -> list[RingEnd]:
        """Ends of the rings that this rank has."""
        maybe = self.stream_in, self.stream_out, self.tokens_in, *self.tokens_out
        return [end for end in maybe if end is not None]


def create_stage_rings(layout: ParallelLayout) -> list[StageRings]:
    """Rings of each rank, in their order."""
    ranks = [StageRings() for _ in range(layout.num_ranks)]
    last = layout.speaker
    for rank in range(last):
        following = ranks[rank + layout.tensor]
        ranks[rank].stream_out, following.stream_in = create_ring()
        writer, ranks[rank].tokens_in = create_ring()
        ranks[last + rank % layout.tensor].tokens_out.append(writer)
    return ranks
