"""Options of engines whose linear layers are of another kind, and the model folders that they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch

from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.quantization import GGUF
from headwater.engine_core.weights import blocks, model_file
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.rounding import round_weights
from headwater.kernels.block_formats import Q4_0, Q4_1, Q8_0, BlockFormat, BlockWeight, pack
from tests.combinations.capability import Fields
from tests.combinations.fitted_options import fitted

LAYER_FORMATS = (Q4_1, Q4_0, Q8_0)
"""Formats that layers take in turn."""


def engine_options(common: Fields, changes: Fields, weights: str) -> dict[str, Any]:
    """The options `common` of all engines, `model_folder` among them, with the changes of capabilities. Folders of
    drafters are there, and that of the model has `weights`; empty: its own."""
    options, folder = dict(common), common["model_folder"]
    is_random = options.get("load_format", "auto") != "auto"
    if weights == GGUF and is_random:
        # A drafter reads its folder as the model does.
        folder = options["model_folder"] = _in_blocks(folder, options["dtype"])
        options["load_format"] = "auto"
    options |= fitted(changes, folder)
    if weights not in ("", GGUF):
        options["model_folder"] = _with_rounded(folder, weights, is_random=is_random)
    return options


def _with_rounded(folder: Path, kind: str, *, is_random: bool) -> Path:
    """A copy of a folder, made once, beside it: for random weights of the kind, or with its own, rounded."""
    copy = folder.with_name(f"{folder.name}-{kind}")
    if copy.exists():
        return copy
    _copy(folder, copy)
    if not is_random:
        _round(folder, copy, kind)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "headwater", "kind": kind}
    (copy / "config.json").chmod(0o644)
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return copy


def _in_blocks(folder: Path, dtype: str) -> Path:
    """A copy of a folder, made once, beside it, with random matrices in GGUF's block formats."""
    copy = folder.with_name(f"{folder.name}-{GGUF}")
    if copy.exists():
        return copy
    _copy(folder, copy)
    config = registry.read_config(folder)
    random = dummy(model_class(config).layout(config), model_file.DTYPES[dtype], torch.device("cpu"))
    tensors: model_file.Tensors = {}
    for turn, (name, tensor) in enumerate(random.items()):
        is_of_layer = name.startswith("layers.")
        format = LAYER_FORMATS[turn % len(LAYER_FORMATS)] if is_of_layer else Q8_0
        tensors |= blocks.named([_quantized(tensor, format)], name) if tensor.dim() == 2 else {name: tensor}
    model_file.save(tensors, copy)
    return copy


def _quantized(matrix: torch.Tensor, format: BlockFormat) -> BlockWeight:
    """The matrix as ggml rounds it."""
    rows = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType(format.type_id))
    return pack(torch.from_numpy(rows), format)


def _copy(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*", "packed-*"))


def _round(folder: Path, copy: Path, kind: str) -> None:
    config, dtype = registry.read_config(folder), model_file.DTYPES[model_file.stored_dtype(folder)]
    tensors = model_file.load(folder, torch.device("cpu"))
    layout = model_class(config).layout(config)
    for name, spec in layout.items():
        if spec.tied_to:
            tensors.pop(name, None)
    rounded, _ = round_weights(tensors, layout, kind, dtype)
    model_file.save(rounded, copy)
