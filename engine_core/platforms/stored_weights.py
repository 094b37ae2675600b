"""Weights between a checkpoint and a platform: the forms in which they are loaded, and what a
platform converts to its own layouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..layers.leaves import WithLeaves, cut_leaves
from ..layers.linear.kinds import Weights
from ..options import BuildRequest
from ..weights.byte_weights import Keeps, keeps_none


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForms:
    """Forms of weights that are loaded as they are stored. All other weights are expanded to the
    model's dtype, and with `--numerics tree` all weights are."""

    keeps_packed: bool = False
    """Keeps weights in block formats, and integers."""
    keeps: Keeps = keeps_none
    """Chooses, by name and weight, those in block formats and of eight bits that are kept where
    `keeps_packed` is not set."""
    expands_expert_blocks: bool = False
    """Expands weights of experts in block formats, whatever `keeps` chooses."""
    in_planes: bool = False
    """Puts weights in block formats that are kept into planes."""
    with_leaves: WithLeaves = cut_leaves
    """Makes of weights under `numerics` tree what the platform multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Weights of a model, or of a part of it, as they were loaded."""

    request: BuildRequest
    weights: Weights
    part: str = ""
    """Names the part of the model; empty: the whole model."""
    folder: Path | None = None
    """Folder of the weights, where a platform may cache their converted form; None: no cache."""
