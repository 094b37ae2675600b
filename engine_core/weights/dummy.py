"""Random weights, for measuring models whose weights are not at hand."""

from __future__ import annotations

import torch

from headwater.engine_core.weights.layout import Layout
from headwater.engine_core.weights.model_file import Tensors

DUMMIES = {"dummy": False, "dummy-uniform": True}
"""Names of random weights, and whether they are uniform."""
UNIFORM_SPREAD = 1e-3
"""As vLLM's loader makes random weights. Numbers so small move fewer wires: a GPU at its limit of power computes them
faster than those of a trained model, so a comparison with such figures needs the same."""
NORMAL_SPREAD = 0.02


def dummy(layout: Layout, dtype: torch.dtype, device: torch.device, seed: int = 0, *, uniform: bool = False) -> Tensors:
    """Random weights of the right shapes: normal ones, scaled so that activations stay finite, between norms of one;
    or all of them, norms too, uniform within `UNIFORM_SPREAD`."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, spec in layout.items():
        if spec.tied_to:
            continue
        tensors[name] = tensor = torch.empty(spec.shape, dtype=dtype, device=device)
        if uniform:
            tensor.uniform_(-UNIFORM_SPREAD, UNIFORM_SPREAD, generator=generator)
        elif spec.is_norm:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, NORMAL_SPREAD, generator=generator)
    return tensors
