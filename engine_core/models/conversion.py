"""From a checkpoint to a folder that engines read: `config.json`, and weights in the layout that kernels read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from headwater.engine_core.layers.kinds import load_weights
from headwater.engine_core.layers.packed import pack_linears
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.gguf import GgufFile
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder


def convert(source: Path, folder: Path, *, dtype: str, progress: Callable[[int, int], None]) -> None:
    """Writes `config.json` and the weights into `folder`; source is a .gguf file or a Hugging Face folder. Progress is
    told in tensors.

    Raises `ConfigError` for an architecture or a tensor that is not served.
    """
    checkpoint = HuggingFaceFolder(source) if source.is_dir() else GgufFile(source)
    hf_config = checkpoint.hf_config()
    config, total = registry.config_of(hf_config), len(checkpoint) + 1
    model = registry.model_class(config)
    computed_in = model_file.DTYPES[dtype]
    tensors = model.names.collect(checkpoint.tensors(), computed_in, lambda done: progress(done, total))
    layout = model.layout(config)
    for name, spec in layout.items():
        if spec.tied_to:
            tensors.pop(name, None)
    load_weights(layout, tensors, computed_in)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    model_file.save(tensors, folder)
    progress(total, total)


def pack_folder(folder: Path, progress: Callable[[int, int], None]) -> None:
    """Packs the matrices of a converted model into a file beside them, for machines on which the engines may not write
    its folder. Progress is told in matrices."""
    config = registry.read_config(folder)
    layout = registry.model_class(config).layout(config)
    tensors = model_file.load(folder, torch.device("cpu"))
    weights = load_weights(layout, tensors, model_file.DTYPES[model_file.stored_dtype(folder)])
    pack_linears(weights, folder, progress)
