"""Argument of a rank's process, as JSON: options and inherited descriptors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..options import ExecutorOptions
from ..system.ring import RingEnd, anonymous_memory
from .board import create_board
from .memory_group import GroupEnd
from .rank_rings import RankRings
from .rendezvous import Rendezvous
from .stage_rings import StageRings

PATHS = ("model_folder", "draft_model", "draft_heads", "kv_disk_dir", "stage_secret_file")


class SharedMemory(NamedTuple):
    """Descriptors of memory that all ranks of a host map."""

    board: int
    slots: int
    """Memory for blocks outside the KV cache; empty until a rank knows its size."""
    exchange: int
    """Memory through which ranks exchange tensors where GPUs do not reach one another's; empty
    where they do."""
    adapters: int
    """Memory for adapters; the executor writes them, and ranks read their parts."""

    @classmethod
    def create(cls, num_ranks: int) -> SharedMemory:
        """None of it is inherited unless it is asked for. What uses the last three sets their
        sizes."""
        names = ("slots", "exchange", "adapters")
        empty = [anonymous_memory(f"headwater-{name}", 0) for name in names]
        return cls(create_board(num_ranks), *empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    rank: int
    options: ExecutorOptions
    rings: RankRings
    group: GroupEnd
    memory: SharedMemory
    rendezvous: Rendezvous | None
    """Rendezvous of stages; None: all stages are on this host."""
    lifeline: int
    """Reaches end of file when the executor's process is gone."""
    life: int
    """Descriptor that is kept open, so that the executor notices the end of this process."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        of_rings = [fd for end in self.rings.ends for fd in end]
        return *of_rings, *self.group.descriptors, *self.memory, self.lifeline, self.life

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=_text)

    @classmethod
    def from_json(cls, text: str) -> RankStart:
        fields = json.loads(text)
        options = fields["options"]
        rings = fields["rings"]
        stages = fields["rings"]["stages"]
        paths = {name: None if options[name] is None else Path(options[name]) for name in PATHS}
        tokens_out = [RingEnd(*end) for end in stages.pop("tokens_out")]
        of_stages = {name: None if end is None else RingEnd(*end) for name, end in stages.items()}
        found = RankRings(
            RingEnd(*rings["plans"]),
            RingEnd(*rings["reports"]),
            StageRings(**of_stages, tokens_out=tokens_out),
        )
        fields |= {"options": ExecutorOptions(**options | paths), "rings": found}
        fields |= {"group": GroupEnd(*fields["group"]), "memory": SharedMemory(*fields["memory"])}
        if fields["rendezvous"] is not None:
            fields["rendezvous"] = Rendezvous(*fields["rendezvous"])
        return cls(**fields)


def _text(value: Any) -> str:
    assert isinstance(value, Path)
    return str(value)
