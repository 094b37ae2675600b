"""Model folders whose linear layers are of another kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.rounding import round_weights


def with_weights(folder: Path, kind: str, *, is_random: bool) -> Path:
    """A copy of a folder, made once, beside it: for random weights of the kind, or with its own, rounded."""
    copy = folder.with_name(f"{folder.name}-{kind}")
    if copy.exists():
        return copy
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*", "packed-*"))
    if not is_random:
        _round(folder, copy, kind)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "headwater", "kind": kind}
    (copy / "config.json").chmod(0o644)
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return copy


def _round(folder: Path, copy: Path, kind: str) -> None:
    config, dtype = registry.read_config(folder), model_file.DTYPES[model_file.stored_dtype(folder)]
    tensors = model_file.load(folder, torch.device("cpu"))
    layout = model_class(config).layout(config)
    for name, spec in layout.items():
        if spec.tied_to:
            tensors.pop(name, None)
    rounded, _ = round_weights(tensors, layout, kind, dtype)
    model_file.save(rounded, copy)
