"""Contract of the part of a layer that reads earlier tokens."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..batch import ForwardBatch


class Mixer(Protocol):
    """Attention, or another layer over the tokens of a sequence, in two parts: the last layer of a
    model leaves out queries that are of no use."""

    def queries(self, x: Any, batch: ForwardBatch, kv_cache: torch.Tensor) -> Any:
        """x [T, H], as the input norm makes it, → queries of T tokens. Writes to the layer's
        cache."""

    def kept(self, queries: Any, tokens: torch.Tensor) -> Any:
        """The queries of some tokens alone, integers [E]."""

    def attend(self, queries: Any, kv_cache: torch.Tensor, attention_plan: Any) -> torch.Tensor:
        """Queries of the E tokens of the plan → [E, H]"""
