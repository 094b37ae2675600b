"""Parts of the served model that draft heads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..layers.embedding import Embedding
from ..layers.linear.linear import Product
from ..weights.model_config import ModelConfig


class Served(Protocol):
    """A `Model`, or a rank's part of one."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def embedding(self) -> Embedding: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V]; on a rank those of its part of the vocabulary."""


@dataclass(frozen=True, slots=True)
class ServedPart:
    """A rank's part of a served model whose own logits are gathered from all ranks: these are
    not."""

    config: ModelConfig
    embedding: Embedding
    head: Product
    """The rank's rows of the vocabulary head."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
