"""Facts that pipeline stages need of what drafts on the first one. Knows no tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from .heads_config import EAGLE, MEDUSA, HeadsConfig

SAMPLED = "sampled"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDrafts:
    """A draft model, or heads, which read hidden states of later stages."""

    most: int = 0
    """Guesses for one row and step; 0: any number."""
    final: str = ""
    """Tokens whose normed hidden states heads read: `SAMPLED`, those after which one is sampled, or
    `ALL`; empty: none."""
    layers: tuple[int, ...] = ()
    """Layers of the served model whose inputs heads read, ascending."""

    @classmethod
    def of(cls, heads: HeadsConfig) -> Self:
        final = {MEDUSA: SAMPLED, EAGLE: ALL}.get(heads.kind, "")
        return cls(most=heads.most, final=final, layers=heads.input_layers)

    @property
    def reads_states(self) -> bool:
        return bool(self.final or self.layers)

    def to_json(self) -> str:
        return json.dumps([self.most, self.final, self.layers])

    @classmethod
    def from_json(cls, text: str) -> Self:
        most, final, layers = json.loads(text)
        return cls(most=most, final=final, layers=tuple(layers))
