"""Folders of big and small models of random weights, for deployments that serve several: the shapes
of workloads on a GPU, which makes the weights itself, and tiny models with weights on a CPU."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from headwater.engine_core.models.model import model_class
from headwater.engine_core.models.registry import read_config
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import dummy

from . import dummy_model
from .workloads import MODELS, TINY

SHAPES = {
    "cuda": {"big": MODELS["qwen3-8b"], "small": MODELS["qwen3-0.6b"]},
    "cpu": {"big": TINY | {"hidden_size": 256, "intermediate_size": 512}, "small": TINY},
}
CACHE_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}
"""KV cache of each model. On a CPU it is no part of what sleep gives back."""


class ModelFolders:
    """Folders of the models, their sizes and the flags of deployments that serve them."""

    def __init__(self, device: str, parent: Path, num_big: int, num_small: int) -> None:
        self._parent = parent
        self.flags = [f"--device={device}"]
        self.sizes: dict[str, int] = {}
        """Bytes of the device that each model takes while it is awake, by its name."""
        for kind, count in {"big": num_big, "small": num_small}.items():
            if not count:
                continue
            first = parent / f"{kind}-0"
            dummy_model.write(kind, SHAPES[device][kind], first)
            num_bytes = _weights(first, writes=device == "cpu")
            # A CPU's engine maps weights as they came and packed, and its cache stays.
            num_bytes = num_bytes + CACHE_BYTES[device] if device == "cuda" else 2 * num_bytes
            for i in range(1, count):
                shutil.copytree(first, parent / f"{kind}-{i}")
            self.sizes |= {f"{kind}-{i}": num_bytes for i in range(count)}
        if device == "cuda":
            self.flags.append("--load-format=dummy")

    def place(self, name: str) -> str:
        """The flag that names a model."""
        return f"--model={name}={self._parent / name}"


def _weights(folder: Path, *, writes: bool) -> int:
    """Bytes of a model's weights. `writes`: random ones go into a file, whose pages a CPU's engine
    gives back when it sleeps."""
    layout = model_class(config := read_config(folder)).layout(config)
    if writes:
        model_file.save(dummy(layout, torch.bfloat16, torch.device("cpu")), folder)
    own = (spec.shape for spec in layout.values() if not spec.tied_to)
    return torch.bfloat16.itemsize * sum(map(math.prod, own))
