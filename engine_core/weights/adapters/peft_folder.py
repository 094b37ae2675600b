"""Reads an adapter in PEFT's layout from a folder: each tensor is judged by its name and shape
before a number of it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...config import ConfigError, require
from ..layout import Layout, WeightSpec
from ..names import CheckpointNames
from ..safetensors_file import without_quotes
from .adapter import Adapter, LowRank
from .content import CONFIG_NAME, MAX_CONFIG_BYTES, TENSORS_NAME, Hashing, read_file
from .peft_config import AdapterConfig, config_of, object_of

MAX_HEADER_BYTES = 8 << 20
MAX_NAME_CHARS = 256
DTYPES = ("F32", "F16", "BF16")
_ROOT = re.compile(r"^(?:base_model\.model\.)?")
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
NOT_SERVED = (
    ("lora_magnitude_vector", "DoRA is not served"),
    ("lora_embedding_", "adapters of embeddings are not served"),
    ("modules_to_save", "whole layers that were trained are not served"),
    ("trainable_tokens", "tokens that were trained are not served"),
    ("lora_bias", "biases of adapters are not served"),
    (".bias", "biases of adapters are not served"),
    ("lm_head", "adapters of the vocabulary head are not served"),
    ("embed_tokens", "adapters of embeddings are not served"),
    (".experts.", "adapters of experts are not served"),
)
"""Parts of names of tensors that are refused, each with the reason."""


def read_adapter(folder: Path, layout: Layout, names: CheckpointNames) -> Adapter:
    """The adapter of a model with this layout. Raises `ConfigError` for a folder that is none, and
    for what is not served, in a sentence that names it."""
    config_bytes = read_file(folder / CONFIG_NAME, MAX_CONFIG_BYTES)
    config = config_of(object_of(config_bytes, CONFIG_NAME))
    data = read_file(folder / TENSORS_NAME, _max_bytes(layout))
    with Hashing(config_bytes, data) as hashing:
        projections = _read(data, config, layout, names)
        return Adapter(
            digest=hashing.digest(),
            rank=max(each.a.shape[0] for each in projections.values()),
            projections=projections,
        )


def _read(
    data: bytes, config: AdapterConfig, layout: Layout, names: CheckpointNames
) -> dict[tuple[str, int], LowRank]:
    """The factors of a file of safetensors."""
    shapes = _shapes_of(data)
    places = {name: _place(name, shape, config, layout, names) for name, shape in shapes.items()}
    try:
        tensors = load(data)
    except SafetensorError as error:
        allowed = f"a whole file of safetensors ({without_quotes(error)})"
        raise ConfigError("adapter file", TENSORS_NAME, allowed) from None
    return _projections(tensors, places, config, layout)


def _max_bytes(layout: Layout) -> int:
    """Bytes of the largest adapter of the model: every layer in float32 with the highest rank."""
    numbers = sum(
        len(spec.parts or (1,)) * spec.shape[1] + spec.shape[0] for spec in _linears(layout)
    )
    return 4 * 256 * numbers + MAX_HEADER_BYTES


def _linears(layout: Layout) -> Iterator[WeightSpec]:
    return (spec for spec in layout.values() if spec.is_linear and not spec.num_experts)


def _shapes_of(data: bytes) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors by name, as its header says."""
    length = int.from_bytes(data[:8], "little")
    is_whole = 8 + length <= len(data) and length <= MAX_HEADER_BYTES
    require(is_whole, "adapter file", TENSORS_NAME, "a whole file of safetensors")
    header = object_of(data[8 : 8 + length], f"header of {TENSORS_NAME}")
    shapes = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        shown = name[:MAX_NAME_CHARS]
        dtype = facts.get("dtype") if isinstance(facts, dict) else None
        require(dtype in DTYPES, f"dtype of tensor {shown}", str(dtype)[:80], " or ".join(DTYPES))
        shape = facts.get("shape")
        is_shape = isinstance(shape, list) and all(type(size) is int for size in shape)
        require(is_shape, f"shape of tensor {shown}", str(shape)[:80], "a list of numbers")
        shapes[name] = tuple(shape)
    require(shapes, "adapter file", TENSORS_NAME, "a file with tensors")
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Place of a tensor."""

    layer: str
    """A layer of the layout."""
    part: int | None
    """The projection in it; None: all that are joined there."""
    published: str
    """The projection's published name."""
    is_a: bool
    """Whether it is the first factor."""


def _place(
    name: str,
    shape: tuple[int, ...],
    config: AdapterConfig,
    layout: Layout,
    names: CheckpointNames,
) -> _Place:
    """Raises `ConfigError` for a tensor of another layer or another shape."""
    shown = name[:MAX_NAME_CHARS]
    for part_of_name, why in NOT_SERVED:
        if part_of_name in name:
            raise ConfigError("adapter tensor", shown, f"factors of linear layers: {why}")
    match = _TENSOR.fullmatch(name) if len(name) <= MAX_NAME_CHARS else None
    if match is None:
        raise ConfigError("adapter tensor", shown, "lora_A.weight and lora_B.weight of layers")
    published = _ROOT.sub("", match[1], count=1)
    try:
        layer, part = names.projection(published, layout)
    except ConfigError:
        raise ConfigError("adapter tensor", shown, "linear layers of the base model") from None
    require(config.is_target(published), "adapter tensor", shown, "layers of target_modules")
    place = _Place(layer=layer, part=part, published=published, is_a=match[2] == "A")
    rank = config.rank_of(published)
    num_outputs, num_inputs = _sizes(place, layout)
    expected = (rank, num_inputs) if place.is_a else (num_outputs, rank)
    require(shape == expected, f"shape of adapter tensor {shown}", shape, str(expected))
    return place


def _sizes(place: _Place, layout: Layout) -> tuple[int, int]:
    """Outputs and inputs of a projection."""
    spec = layout[place.layer]
    outputs = spec.shape[0] if place.part is None else spec.parts[place.part]
    return outputs, spec.shape[1]


def _projections(
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, _Place],
    config: AdapterConfig,
    layout: Layout,
) -> dict[tuple[str, int], LowRank]:
    found: dict[str, dict[bool, torch.Tensor]] = {}
    where: dict[str, _Place] = {}
    for name, place in places.items():
        tensor = tensors[name]
        allowed = "finite numbers"
        require(_is_finite(tensor), f"adapter tensor {name}", "nan or inf", allowed)
        found.setdefault(place.published, {})[place.is_a] = tensor
        where[place.published] = place
    projections: dict[tuple[str, int], LowRank] = {}
    for published, factors in found.items():
        require(len(factors) == 2, f"adapter of {published}", "one tensor", "lora_A and lora_B")
        for key, low_rank in _split(where[published], factors, config, layout):
            require(key not in projections, f"adapter of {published}", "a second one", "one")
            projections[key] = low_rank
    return projections


def _is_finite(tensor: torch.Tensor) -> bool:
    # The sum takes a fourth of the time, and is finite unless a number is not, or all are huge.
    total = float(tensor.sum(dtype=torch.float32))
    return math.isfinite(total) or bool(torch.isfinite(tensor).all())


def _split(
    place: _Place, factors: Mapping[bool, torch.Tensor], config: AdapterConfig, layout: Layout
) -> Iterator[tuple[tuple[str, int], LowRank]]:
    """The factors of each projection: those that are published joined have one A."""
    a, b = factors[True], factors[False]
    factor = config.factor_of(place.published)
    require(math.isfinite(factor), f"factor of {place.published}", factor, "a finite number")
    if place.part is not None:
        yield (place.layer, place.part), LowRank(a, b, factor)
        return
    parts = layout[place.layer].parts or (layout[place.layer].shape[0],)
    for i, piece in enumerate(torch.split(b, list(parts))):
        yield (place.layer, i), LowRank(a, piece, factor)
