"""Argument of a rank's process, as JSON: options and inherited descriptors."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..options import ExecutorOptions
from ..ring import RingEnd
from .memory_group import GroupEnd

RINGS = ("plans", "reports", "stream_in", "stream_out", "tokens_in")
PATHS = ("model_folder", "draft_model", "draft_heads", "kv_disk_dir", "stage_secret_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    rank: int
    options: ExecutorOptions
    plans: RingEnd
    reports: RingEnd
    group: GroupEnd
    stream_in: RingEnd | None
    """From the same shard of the stage before."""
    stream_out: RingEnd | None
    """To that of the next stage."""
    tokens_in: RingEnd | None
    """From that of the last stage."""
    tokens_out: list[RingEnd]
    """From the last stage to that of each stage before, in their order."""
    board: int
    slots: int
    """Memory for blocks outside the KV cache; empty until a rank knows its size."""
    exchange: int
    """Memory through which ranks exchange tensors where their GPUs do not reach one another's; empty where they do."""
    lifeline: int
    """Reaches end of file when the executor's process is gone."""
    life: int
    """Held open, so that the executor sees the end of this process."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        rings = (self.plans, self.reports, self.stream_in, self.stream_out, self.tokens_in, *self.tokens_out)
        of_rings = [fd for ring in rings if ring is not None for fd in ring]
        memory = self.board, self.slots, self.exchange
        return *of_rings, *self.group.descriptors, *memory, self.lifeline, self.life

    def to_json(self) -> str:
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        options = {field.name: getattr(self.options, field.name) for field in fields(ExecutorOptions)}
        own["options"] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        return json.dumps(own)

    @classmethod
    def from_json(cls, text: str) -> RankStart:
        told = json.loads(text)
        options = told["options"]
        for name in PATHS:
            options[name] = None if options[name] is None else Path(options[name])
        told |= {"options": ExecutorOptions(**options), "group": GroupEnd(*told["group"])}
        told["tokens_out"] = [RingEnd(*end) for end in told["tokens_out"]]
        return cls(**told | {name: RingEnd(*told[name]) for name in RINGS if told[name] is not None})
