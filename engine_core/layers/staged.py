"""Weights of a pipeline stage: some layers of a model, numbered from 0 as a smaller model's own.

The first stage has tables outside the layers (the embedding), the last one norms and linear layers
outside them. A model is built of a stage as of a whole model; what stands in the place of weights
that are elsewhere is never used.
"""

from __future__ import annotations

import re

import torch

from ..weights.layout import Layout, WeightSpec
from ..weights.shards import Stage
from .linear.kinds import Weights
from .linear.linear import Linear
from .routing import ExpertStack

_LAYER = re.compile(r"layers\.(\d+)\.")


class AbsentLinear(Linear):
    """Placeholder of a linear layer of another stage."""

    kind = "absent"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.out_features, self.in_features = shape

    def product(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("another stage has this layer")


def layer_of(name: str) -> int | None:
    """The layer of a weight; None: it is outside the layers."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def is_of_first_stage(spec: WeightSpec) -> bool:
    """Whether the first stage has a weight outside the layers; others are the last stage's."""
    return not (spec.is_linear or spec.is_norm or spec.is_bias or spec.follows_layers)


def stage_layout(layout: Layout, stage: Stage) -> Layout:
    """The weights that a stage has, by their names in the whole model."""
    return {name: spec for name, spec in layout.items() if _has(stage, name, spec)}


def local_names(layout: Layout, stage: Stage) -> Layout:
    """The layout with the layers of a stage numbered from 0, and those of others left out."""
    named = ((local_name(name, stage), spec) for name, spec in layout.items())
    return {name: spec for name, spec in named if name is not None}


def stage_weights(weights: Weights, layout: Layout, stage: Stage, dtype: torch.dtype) -> Weights:
    """A stage's weights with its layers numbered from 0 and something in the place of what other
    stages have."""
    linears: dict[str, Linear] = {}
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, ExpertStack] = {}
    for name, spec in layout.items():
        local = local_name(name, stage)
        if local is None:
            continue
        if _has(stage, name, spec):
            if spec.num_experts:
                experts[local] = weights.experts[name]
            elif spec.is_linear:
                linears[local] = weights.linears[name]
            elif name in weights.tensors:
                tensors[local] = weights.tensors[name]
        elif spec.is_linear:
            linears[local] = AbsentLinear(spec.shape)
        else:
            tensors[local] = torch.zeros(
                spec.shape if spec.is_norm or spec.is_bias else (0, *spec.shape[1:]), dtype=dtype
            )
    tables = {
        name: table for name, table in weights.tables.items() if _has(stage, name, layout[name])
    }
    return Weights(linears=linears, tensors=tensors, tables=tables, experts=experts)


def local_name(name: str, stage: Stage) -> str | None:
    """A weight's name with the layers of a stage numbered from 0; None: another stage has it."""
    layer = layer_of(name)
    if layer is None:
        return name
    if not stage.first <= layer < stage.stop:
        return None
    return name.replace(f"layers.{layer}.", f"layers.{layer - stage.first}.", 1)


def _has(stage: Stage, name: str, spec: WeightSpec) -> bool:
    if (layer := layer_of(name)) is not None:
        return stage.first <= layer < stage.stop
    return stage.is_first if is_of_first_stage(spec) else stage.is_last
