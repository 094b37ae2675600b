"""Names in the checkpoints of an architecture whose code is that of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ...weights.layout import Layout
from ...weights.model_config import ModelConfig
from ...weights.model_file import Tensors
from ...weights.names import NO_LAYOUT, CheckpointNames, Weight, canonical
from .probe import facts_of

_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignNames(CheckpointNames):
    """Names of tensors that depend on the config, which `collect` gets."""

    def collect(
        self,
        tensors: Iterable[tuple[str, Weight]],
        dtype: torch.dtype,
        progress: Callable[[int], None],
        layout: Layout = NO_LAYOUT,
        *,
        config: ModelConfig | None = None,
        spare_layers: range = range(0),
        left_out: list[str] | None = None,
    ) -> Tensors:
        assert config is not None
        return names_of(config).collect(
            tensors,
            dtype,
            progress,
            layout,
            config=config,
            spare_layers=spare_layers,
            left_out=left_out,
        )


def names_of(config: ModelConfig) -> CheckpointNames:
    """Names of a config's tensors."""
    assert config.foreign is not None
    model: dict[str, str] = {}
    layer: dict[str, str] = {}
    for theirs, ours in facts_of(config.foreign).names.items():
        known = canonical(theirs)
        if match := _LAYER.fullmatch(known):
            layer[match[1]] = ours.split(".", 2)[2]
        else:
            model[known] = ours
    return CheckpointNames(model=model, layer=layer, fused={})
