"""Packs a converted model ahead of the engines that serve it on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..layers.linear.kinds import Weights, load_weights
from ..layers.linear.packed import pack_linears
from ..weights import model_file
from . import registry
from .model import model_class


def pack_folder(folder: Path, progress: Callable[[int, int], None]) -> Weights:
    """Packs the dense matrices of a converted model into a file beside them, for machines on which
    the engines may not write its folder. Returns the weights as a CPU serves them. Progress is
    reported in matrices."""
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    weights = load_weights(layout, tensors, model_file.DTYPES[model_file.stored_dtype(folder)])
    return pack_linears(weights, folder, progress)
