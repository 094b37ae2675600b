"""Input of one pass of an encoder: whole texts, one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """T tokens of some texts."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T] place of each token in its text"""
    texts: Any
    """The platform's plan of the texts."""
    types: torch.Tensor | None = None
    """int64 [T] type of each token; None: 0."""
