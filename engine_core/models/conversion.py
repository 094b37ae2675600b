"""From a checkpoint to a folder that engines read: `config.json`, and weights in the layout that kernels read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from headwater.kernels.block_formats import BlockWeight

from ..layers.kinds import Weights, load_weights
from ..layers.packed import pack_linears
from ..weights import model_file
from ..weights.gguf import GgufFile
from ..weights.hugging_face import HuggingFaceFolder
from ..weights.layout import Layout
from ..weights.unpacking import unpacked
from . import registry
from .model import model_class


def convert(source: Path, folder: Path, *, dtype: str, progress: Callable[[int, int], None]) -> None:
    """Writes `config.json` and the weights into `folder`; source is a .gguf file or a Hugging Face folder. Progress is
    told in tensors.

    Raises `ConfigError` for an architecture or a tensor that is not served.
    """
    checkpoint = HuggingFaceFolder(source) if source.is_dir() else GgufFile(source)
    hf_config = checkpoint.hf_config()
    config, total = registry.config_of(hf_config), len(checkpoint) + 1
    model = model_class(config)
    computed_in = model_file.DTYPES[dtype]
    counted = _counted(checkpoint.tensors(), lambda done: progress(done, total))
    published = unpacked(counted, config.quantization)
    tensors = model.names.collect(published, computed_in, lambda done: None)
    layout = model.layout(config)
    for name, spec in layout.items():
        if spec.tied_to:
            tensors.pop(name, None)
    _drop_idle_biases(tensors, layout)
    load_weights(layout, tensors, computed_in)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    model_file.save(tensors, folder)
    progress(total, total)


def _drop_idle_biases(tensors: model_file.Tensors, layout: Layout) -> None:
    """Tools that pack layers write a bias for each, of zeros where the model has none."""
    for name in [name for name in tensors if name.endswith("bias") and name not in layout]:
        if not bool(tensors[name].any()):
            del tensors[name]


def _counted(
    tensors: Iterator[tuple[str, torch.Tensor | BlockWeight]], progress: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor | BlockWeight]]:
    for done, tensor in enumerate(tensors):
        progress(done)
        yield tensor


def pack_folder(folder: Path, progress: Callable[[int, int], None]) -> Weights:
    """Packs the dense matrices of a converted model into a file beside them, for machines on which the engines may not
    write its folder. Returns the weights as a CPU serves them. Progress is told in matrices."""
    config = registry.read_config(folder)
    layout = model_class(config).layout(config)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    weights = load_weights(layout, tensors, model_file.DTYPES[model_file.stored_dtype(folder)])
    return pack_linears(weights, folder, progress)
