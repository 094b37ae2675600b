"""Options of engines whose linear layers are of another kind, and the model folders that they
name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch

from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.models.mtp import MTP_NAMES, mtp_layout
from headwater.engine_core.weights import blocks, grouped, model_file
from headwater.engine_core.weights.draft_layer import DRAFT_WEIGHTS_NAME, draft_layer_of
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.formats.quantization import GGUF
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.rounding import HEAD, round_weights
from headwater.engine_core.weights.unpacking import unpacked
from headwater.kernels.quant.block_formats import Q4_0, Q4_1, Q8_0, BlockFormat, BlockWeight, pack
from headwater.kernels.quant.byte_weights import ByteWeight
from tests.combinations.capability import Fields
from tests.combinations.fitted_options import fitted
from tests.engine_core.byte_checkpoint import BYTE_FORMS

LAYER_FORMATS = (Q4_1, Q4_0, Q8_0)
"""Formats that layers take in turn."""
FP8_BLOCKS = "fp8 blocks"
W8A8 = "w8a8"
MXFP4 = "mxfp4"
"""Kind of the experts of a model that is published so."""
EMBED = "embed"
BLOCK = 128
FP8_MOST = 448
INT8_MOST = 127
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes of random models of these kinds: most matrices have several blocks, and one is cut off."""
Published = dict[str, torch.Tensor]
"""Tensors of a layer by the last part of their names in a checkpoint."""


def engine_options(
    common: Fields, changes: Fields, weights: str, model: Fields = MappingProxyType({})
) -> dict[str, Any]:
    """The options `common` of all engines, `model_folder` among them, with the changes of
    capabilities. Folders of drafters are there, and that of the model has `weights`; empty: its
    own. `model`: fields of a config of random weights that are changed."""
    options = dict(common)
    folder = common["model_folder"]
    if model:
        folder = options["model_folder"] = _with_config(folder, model)
    is_random = options.get("load_format", "auto") != "auto"
    if weights in PUBLISHED or (weights == GGUF and is_random):
        make = _published if weights in PUBLISHED else _in_blocks
        # A drafter reads its folder as the model does.
        folder = options["model_folder"] = make(
            folder, weights, options["dtype"] if is_random else ""
        )
        options["load_format"] = "auto"
    options |= fitted(changes, folder, options.get("dtype", "float32"))
    if weights not in ("", GGUF, *PUBLISHED):
        options["model_folder"] = _with_rounded(folder, weights, is_random=is_random)
    return options


def _with_config(folder: Path, model: Fields) -> Path:
    """A copy of a folder, made once, beside it, with changes of its config."""
    copy = folder.with_name(f"{folder.name}-{model['model_type']}")
    if not copy.exists():
        _copy(folder, copy)
        config = json.loads((folder / "config.json").read_text())
        (copy / "config.json").chmod(0o644)
        (copy / "config.json").write_text(json.dumps({**config, **model}))
    return copy


def num_experts_of(options: dict[str, Any]) -> int:
    """Experts of a layer of the model that an engine serves; 0: it has none."""
    folder = options["model_folder"]
    config = {} if folder is None else json.loads((folder / "config.json").read_text())
    found: int = config.get("num_experts") or config.get("num_local_experts", 0)
    return found


def is_encoder(options: dict[str, Any]) -> bool:
    """Whether the model that an engine serves is one."""
    folder = options["model_folder"]
    return folder is not None and registry.read_config(folder).encoder is not None


def latent_rank_of(options: dict[str, Any]) -> int:
    """Numbers that keys and values of the model are made of, which an engine serves; 0: it caches
    keys and values."""
    folder = options["model_folder"]
    config = {} if folder is None else json.loads((folder / "config.json").read_text())
    found: int = config.get("kv_lora_rank", 0)
    return found


STATE_LAYER = "linear_attention"
WINDOW_LAYER = "sliding_attention"
"""Types of layers, as `config.json` calls them."""


def num_layers_of(options: dict[str, Any], layer_type: str) -> int:
    """Layers of a type, as `config.json` calls it, of the model that an engine serves."""
    folder = options["model_folder"]
    config = {} if folder is None else json.loads((folder / "config.json").read_text())
    kinds: list[str] = config.get("layer_types") or []
    return kinds.count(layer_type)


def kind_of(options: dict[str, Any]) -> str:
    """The kind of weights that the folder of an engine's options has, as its file and `config.json`
    say."""
    folder = options["model_folder"]
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if config is None:
        is_stored = (
            options.get("load_format", "auto") == "auto"
            and (folder / model_file.WEIGHTS_NAME).is_file()
        )
        return GGUF if is_stored and model_file.has_blocks(folder) else ""
    if config["quant_method"] == MXFP4:
        return MXFP4
    return config.get("kind") or next(
        kind for kind, (form, _) in PUBLISHED.items() if config == BYTE_FORMS[form].config
    )


def _with_rounded(folder: Path, kind: str, *, is_random: bool) -> Path:
    """A copy of a folder, made once, beside it: for random weights of the kind, or with its own,
    rounded."""
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


def _published(folder: Path, kind: str, dtype: str) -> Path:
    """A copy of a folder, made once, beside it, as a checkpoint of the kind is converted: with
    random weights of `dtype`, or with the folder's own where it is empty."""
    copy = folder.with_name(f"{folder.name}-{kind.replace(' ', '-')}")
    if copy.exists():
        return copy
    _copy(folder, copy)
    form, pack_matrix = PUBLISHED[kind]
    config = json.loads((folder / "config.json").read_text()) | (WIDE if dtype else {})
    (copy / "config.json").chmod(0o644)
    (copy / "config.json").write_text(
        json.dumps(config | {"quantization_config": BYTE_FORMS[form].config})
    )
    model = registry.read_config(copy)
    layout = model_class(model).layout(model)
    cpu = torch.device("cpu")
    dense = dummy(layout, model_file.DTYPES[dtype], cpu) if dtype else model_file.load(folder, cpu)
    kept: model_file.Tensors = {}
    layers: dict[str, torch.Tensor] = {}
    for name, spec in layout.items():
        if not spec.tied_to:
            is_packed = spec.is_linear and name != HEAD and not spec.is_routing
            (layers if is_packed else kept)[name] = dense[name]
    tensors = (
        (f"{name}.{suffix}", part)
        for name, matrix in layers.items()
        for suffix, part in pack_matrix(matrix.float()).items()
    )
    for name, weight in unpacked(tensors, model.quantization):
        assert isinstance(weight, ByteWeight)
        kept |= grouped.named(weight, name.removesuffix(".weight"))
    model_file.save(kept, copy)
    _add_draft_layer(copy, model, dtype)
    return copy


def _add_draft_layer(folder: Path, model: ModelConfig, dtype: str) -> None:
    """Writes the layer for multi-token prediction, with random weights, where a checkpoint of the
    model may have one."""
    if dtype and model.architecture in MTP_NAMES:
        layer = dummy(
            mtp_layout(draft_layer_of(model)), model_file.DTYPES[dtype], torch.device("cpu")
        )
        model_file.save(layer, folder, DRAFT_WEIGHTS_NAME)


def _as_fp8_blocks(weight: torch.Tensor) -> Published:
    """weight float32 [N, K], in e4m3 with a scale for each block, as DeepSeek and Qwen publish
    it."""
    n, k = weight.shape
    whole = torch.zeros(n + -n % BLOCK, k + -k % BLOCK)
    whole[:n, :k] = weight
    scales = whole.view(len(whole) // BLOCK, BLOCK, -1, BLOCK).abs().amax((1, 3)) / FP8_MOST
    of_weights = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
    return {"weight": (weight / of_weights).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _as_int8(weight: torch.Tensor) -> Published:
    """weight float32 [N, K], with a scale for each output, as llmcompressor writes W8A8."""
    scales = weight.abs().amax(1, keepdim=True) / INT8_MOST
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


PUBLISHED: dict[str, tuple[str, Callable[[torch.Tensor], Published]]] = {
    FP8_BLOCKS: ("fp8, blocks larger than a matrix", _as_fp8_blocks),
    W8A8: ("int-quantized W8A8", _as_int8),
}
"""Kinds of which there are checkpoints alone: the form whose `config.json` they have, and the
tensors of a matrix."""


def _in_blocks(folder: Path, kind: str, dtype: str) -> Path:
    """A copy of a folder, made once, beside it, with random matrices in GGUF's block formats."""
    copy = folder.with_name(f"{folder.name}-{kind}")
    if copy.exists():
        return copy
    _copy(folder, copy)
    published = json.loads((folder / "config.json").read_text())
    if published.pop("quantization_config", None) is not None:
        # Blocks take the place of what a checkpoint of this config has.
        (copy / "config.json").write_text(json.dumps(published))
    config = registry.read_config(copy)
    layout = model_class(config).layout(config)
    random = dummy(layout, model_file.DTYPES[dtype], torch.device("cpu"))
    tensors: model_file.Tensors = {}
    for turn, (name, tensor) in enumerate(random.items()):
        is_of_layer = name.startswith("layers.")
        format = LAYER_FORMATS[turn % len(LAYER_FORMATS)] if is_of_layer else Q8_0
        spec = layout[name]
        # Conversion expands tables but that of tokens.
        is_packed = name in (EMBED, HEAD) or (
            is_of_layer and spec.is_linear and not spec.is_routing
        )
        tensors |= (
            blocks.named([_quantized(tensor, format)], name)
            if is_packed and tensor.dim() == 2 and tensor.shape[1] % 32 == 0
            else {name: tensor}
        )
    model_file.save(tensors, copy)
    _add_draft_layer(copy, config, dtype)
    return copy


def _quantized(matrix: torch.Tensor, format: BlockFormat) -> BlockWeight:
    """The matrix as ggml rounds it."""
    rows = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType(format.type_id))
    return pack(torch.from_numpy(rows), format)


def _copy(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*", "packed-*"))


def _round(folder: Path, copy: Path, kind: str) -> None:
    config = registry.read_config(folder)
    dtype = model_file.DTYPES[model_file.stored_dtype(folder)]
    tensors = model_file.load(folder, torch.device("cpu"))
    layout = model_class(config).layout(config)
    for name, spec in layout.items():
        if spec.tied_to:
            tensors.pop(name, None)
    rounded, _ = round_weights(tensors, layout, kind, dtype)
    model_file.save(rounded, copy)
