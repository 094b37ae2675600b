"""Input of one pass of an encoder: whole texts, one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..executor import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """T tokens of R texts."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T] place of each token in its text"""
    counts: Int32Array
    """[R] tokens of each text."""
    types: torch.Tensor | None = None
    """int64 [T] type of each token; None: 0."""
