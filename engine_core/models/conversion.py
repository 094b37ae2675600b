"""Converts a checkpoint to a folder that engines read: `config.json`, and weights in the layout
that kernels read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError, require
from ..layers.linear.kinds import load_weights
from ..weights import model_file
from ..weights.formats.gguf_file import GgufFile
from ..weights.formats.packing import KEY
from ..weights.formats.quantization import AUTO, GGUF, NONE, ROUNDED, check_quantization
from ..weights.hugging_face import HuggingFaceFolder
from ..weights.layout import Layout
from ..weights.model_config import ModelConfig
from ..weights.names import in_one_line, is_flat
from ..weights.rounding import ROUNDINGS, Rounding, round_weights
from ..weights.unpacking import unpacked
from . import registry
from .calibration import Calibrated
from .model import model_class
from .mtp import MtpTensors
from .score_head import Published, with_score_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Outcome of a checkpoint's conversion."""

    quantization: str
    """Method by which its weights are packed, kind to which they were rounded, or `none`."""
    rounding: Rounding | None = None
    """How weights were rounded; None: they were not, or a calibration had rounded them."""
    cost: str = ""
    """Loss by rounding, for people; empty: nothing was rounded."""
    left_out: str = ""
    """Tensors of the checkpoint that are not used, for people; empty: there are none."""
    has_draft_layer: bool = False
    """Whether the checkpoint has a layer that drafts, which is in the folder too."""


def convert(
    source: Path,
    folder: Path,
    *,
    dtype: str,
    progress: Callable[[int, int], None],
    quantization: str = AUTO,
    calibrated: bool = False,
    model_code: str = registry.AUTO,
    judges_by: tuple[int, int] | None = None,
    arriving: Path | None = None,
) -> Converted:
    """Writes `config.json` and the weights into `folder`; source is a .gguf file or a Hugging Face
    folder. Progress is reported in tensors. `quantization` is one of `QUANTIZATIONS`: weights that
    are not packed are rounded to a kind; `calibrated`: the source is what `calibrate` made of that
    kind. `judges_by`: ids of the tokens whose logits are a reranker's judgement, yes and no, where
    no file of the folder names them. `arriving`: a file that is there while shards still arrive.

    Raises `ConfigError` for an architecture or a tensor that is not served, for a dtype that does
    not hold the model's hidden states, and for a checkpoint that is packed by another method than
    `quantization` says.
    """
    checkpoint = (
        HuggingFaceFolder(source, judges_by, arriving)
        if source.is_dir()
        else GgufFile(source, registry.gguf_of_others)
    )
    hf_config = checkpoint.hf_config()
    if model_code != registry.AUTO:
        hf_config[registry.MODEL_CODE] = model_code
    config = registry.config_of(hf_config)
    if isinstance(checkpoint, HuggingFaceFolder) and _is_headless(checkpoint, hf_config):
        # Embeddings read hidden states; the head of such a model is its embedding.
        hf_config |= {"tie_word_embeddings": True}
        config = replace(config, tie_word_embeddings=True)
    total = len(checkpoint) + 1
    config.check_dtype(dtype)
    found = _method(checkpoint, config)
    rounding = None
    cost = ""
    rounds = found == NONE and quantization in ROUNDINGS
    if rounds or calibrated:
        hf_config |= {KEY: {"quant_method": ROUNDED, "kind": quantization}}
    else:
        check_quantization(quantization, found, "the checkpoint")
    layout = model_class(config).layout(config)
    computed_in = model_file.DTYPES[dtype]
    mtp = MtpTensors.of(checkpoint, config) if isinstance(checkpoint, HuggingFaceFolder) else None
    published: Published = checkpoint.tensors() if mtp is None else mtp.others()
    published = with_score_head(published, config, registry.sentence_of(hf_config))
    counted = _counted(published, lambda done: progress(min(done, total - 1), total))
    left_out: list[str] = []
    spare = _spare_layers(config, hf_config)
    tensors = _collected(counted, config, layout, computed_in, spare, left_out)
    if rounds:
        tensors, rounding = round_weights(tensors, layout, quantization, computed_in)
        cost = str(rounding)
    elif calibrated:
        cost = Calibrated.read(source).cost(sum(tensor.nbytes for tensor in tensors.values()))
    load_weights(layout, tensors, computed_in)
    if mtp is not None:
        mtp.write(config, computed_in, left_out, folder)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    model_file.save(tensors, folder)
    progress(total, total)
    packed_by = quantization if rounds or calibrated else found
    return Converted(
        quantization=packed_by,
        rounding=rounding,
        cost=cost,
        left_out=in_one_line(left_out),
        has_draft_layer=mtp is not None,
    )


def _is_headless(checkpoint: HuggingFaceFolder, hf_config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was made of a model without its head."""
    if "lm_head.weight" in checkpoint.names():
        return False
    return registry.has_no_head(hf_config) or all(map(is_flat, checkpoint.names()))


def _spare_layers(config: ModelConfig, hf_config: Mapping[str, Any]) -> range:
    """Layers after the last one that the config declares as draft layers."""
    number = hf_config.get("num_nextn_predict_layers") or 0
    is_number = type(number) is int and 0 <= number <= config.num_layers
    require(is_number, "num_nextn_predict_layers", number, f"0…{config.num_layers}")
    return range(config.num_layers, config.num_layers + number)


def _collected(
    published: Published,
    config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    spare_layers: range,
    left_out: list[str],
) -> model_file.Tensors:
    """The tensors of a checkpoint under the names of the layout. Raises `ConfigError` for a head of
    its own beside a config that ties it to the embedding: other tools serve either."""
    names = model_class(config).names
    tensors = names.collect(
        unpacked(published, config.quantization),
        dtype,
        lambda done: None,
        layout,
        config=config,
        spare_layers=spare_layers,
        left_out=left_out,
    )
    for name, spec in layout.items():
        own = tensors.pop(name, None) if spec.tied_to else None
        if own is not None and not torch.equal(own, tensors.get(spec.tied_to, own)):
            raise ConfigError(
                "tie_word_embeddings", True, f"false, or a {name} of the embedding's numbers"
            )
    _drop_idle_biases(tensors, layout)
    return tensors


def _method(checkpoint: HuggingFaceFolder | GgufFile, config: ModelConfig) -> str:
    """Method by which a checkpoint is packed."""
    if isinstance(checkpoint, GgufFile):
        return GGUF if checkpoint.is_packed else NONE
    return NONE if config.quantization is None else config.quantization.method


def _drop_idle_biases(tensors: model_file.Tensors, layout: Layout) -> None:
    """Tools that pack layers write a bias for each, of zeros where the model has none."""
    for name in [name for name in tensors if name.endswith("bias") and name not in layout]:
        if not bool(tensors[name].any()):
            del tensors[name]


def _counted(tensors: Published, progress: Callable[[int], None]) -> Published:
    for done, tensor in enumerate(tensors):
        progress(done)
        yield tensor
