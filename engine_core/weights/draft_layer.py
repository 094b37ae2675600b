"""The decoder layer with which a checkpoint drafts (multi-token prediction): its config, and its
file beside a converted model's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .model_config import ModelConfig

DRAFT_WEIGHTS_NAME = "mtp.safetensors"


def has_draft_layer(folder: Path) -> bool:
    """Whether a converted model's folder has a layer that drafts."""
    return (folder / DRAFT_WEIGHTS_NAME).is_file()


def draft_layer_of(model: ModelConfig) -> ModelConfig:
    """The config of the layer: that of the model's last layer with keys and values. Its weights are
    not packed."""
    last = model.caching_layers[-1]
    return replace(model.of_layers(last, last + 1), delta=None, quantization=None)
