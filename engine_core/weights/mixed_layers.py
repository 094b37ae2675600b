"""Shapes of models whose layers are of two kinds, those with a window and those that see all keys.
Source of all of them: Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayers:
    """Shapes that differ from those of the model's config, which are the shapes of layers with a
    window and with keys of their own."""

    global_head_dim: int
    """Size of a head in layers that see all keys."""
    global_kv_heads: int
    """Key heads of layers that see all keys."""
    reuses_keys: bool = False
    """Whether one projection makes keys and values in layers that see all keys."""
    num_sharing: int = 0
    """Number of last layers that read the keys and values of an earlier layer of their kind."""
    sharing_width: int = 0
    """Intermediate size of the MLPs of those layers."""
    input_size: int = 0
    """Size of the vector that each layer has for a token; 0: layers have none."""
    num_inputs: int = 0
    """Rows of the table of these vectors, one for each token id."""
