"""Reads an adapter in PEFT's layout from a folder: each tensor is judged by its name and shape
before a number of it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...config import ConfigError, require
from ..layout import Layout, WeightSpec
from ..names import CheckpointNames
from .adapter import Adapter, LowRank, is_finite
from .content import CONFIG_NAME, MAX_CONFIG_BYTES, TENSORS_NAME, Hashing, read_file
from .peft_config import AdapterConfig, config_of, object_of

MAX_HEADER_BYTES = 8 << 20
MAX_NAME_CHARS = 256
WHOLE = "a whole file of safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    config = config_of(object_of(bytes(config_bytes), CONFIG_NAME))
    data = read_file(folder / TENSORS_NAME, _max_bytes(layout))
    with Hashing(config_bytes, data) as hashing:
        projections = _read(data, config, layout, names)
        return Adapter(
            digest=hashing.digest(),
            rank=max(each.a.shape[0] for each in projections.values()),
            projections=projections,
        )


def _read(
    data: memoryview, config: AdapterConfig, layout: Layout, names: CheckpointNames
) -> dict[tuple[str, int], LowRank]:
    """The factors of a file of safetensors."""
    entries = _entries_of(data)
    projection = cache(partial(_projection, layout=layout, names=names))
    places = {
        name: _place(name, entry.shape, config, layout, projection)
        for name, entry in entries.items()
    }
    tensors = {name: entry.tensor(data) for name, entry in entries.items()}
    _check_finite(data, entries, tensors)
    return _projections(tensors, places, config, layout)


def _check_finite(
    data: memoryview, entries: Mapping[str, _Entry], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises `ConfigError` for a tensor with a number that is not finite."""
    dtypes = {entry.dtype for entry in entries.values()}
    if len(dtypes) == 1:
        # All at once: there are hundreds of small tensors.
        first = min(entry.begin for entry in entries.values())
        size = max(entry.end for entry in entries.values()) - first
        whole = torch.frombuffer(data, dtype=torch.uint8, offset=first, count=size)
        [dtype] = dtypes
        if size % dtype.itemsize == 0 and is_finite(whole.view(dtype)):
            return
    for name, tensor in tensors.items():
        require(is_finite(tensor), f"adapter tensor {name}", "nan or inf", "finite numbers")


def _max_bytes(layout: Layout) -> int:
    """Bytes of the largest adapter of the model: every layer in float32 with the highest rank."""
    numbers = sum(
        len(spec.parts or (1,)) * spec.shape[1] + spec.shape[0] for spec in _linears(layout)
    )
    return 4 * 256 * numbers + MAX_HEADER_BYTES


def _linears(layout: Layout) -> Iterator[WeightSpec]:
    return (spec for spec in layout.values() if spec.is_linear and not spec.num_experts)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file, as its header says."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes of the file before it, and up to its end."""

    def tensor(self, data: memoryview) -> torch.Tensor:
        """The tensor in the file's bytes. Raises `ConfigError` if they are too few."""
        count = math.prod(self.shape)
        is_whole = 0 <= self.begin <= self.end <= len(data)
        is_whole = is_whole and self.end - self.begin == count * self.dtype.itemsize
        require(is_whole, "adapter file", TENSORS_NAME, WHOLE)
        flat = torch.frombuffer(data, dtype=self.dtype, count=count, offset=self.begin)
        return flat.view(self.shape)


def _entries_of(data: memoryview) -> dict[str, _Entry]:
    """A file's tensors by name."""
    length = int.from_bytes(data[:8], "little")
    first = 8 + length
    is_whole = first <= len(data) and length <= MAX_HEADER_BYTES
    require(is_whole, "adapter file", TENSORS_NAME, WHOLE)
    header = object_of(bytes(data[8:first]), f"header of {TENSORS_NAME}")
    entries = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        shown = name[:MAX_NAME_CHARS]
        dtype = str(facts.get("dtype") if isinstance(facts, dict) else None)
        require(dtype in DTYPES, f"dtype of tensor {shown}", dtype[:80], " or ".join(DTYPES))
        shape = _numbers(f"shape of tensor {shown}", facts.get("shape"))
        offsets = _numbers(f"data_offsets of tensor {shown}", facts.get("data_offsets"))
        require(len(offsets) == 2, f"data_offsets of tensor {shown}", offsets, "two numbers")
        entries[name] = _Entry(DTYPES[dtype], shape, first + offsets[0], first + offsets[1])
    require(entries, "adapter file", TENSORS_NAME, "a file with tensors")
    return entries


def _numbers(field: str, value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and all(type(each) is int for each in value)
    require(is_list, field, str(value)[:80], "a list of numbers")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Place of a tensor."""

    layer: str
    """A layer of the layout."""
    part: int | None
    """Index of the projection among joined ones; None: all of them."""
    published: str
    """The projection's published name."""
    is_a: bool
    """Whether it is A, the first factor."""


def _place(
    name: str,
    shape: tuple[int, ...],
    config: AdapterConfig,
    layout: Layout,
    projection: Callable[[str], tuple[str, int | None] | None],
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
    found = projection(published)
    if found is None:
        raise ConfigError("adapter tensor", shown, "linear layers of the base model")
    layer, part = found
    require(config.is_target(published), "adapter tensor", shown, "layers of target_modules")
    place = _Place(layer=layer, part=part, published=published, is_a=match[2] == "A")
    rank = config.rank_of(published)
    num_outputs, num_inputs = _sizes(place, layout)
    expected = (rank, num_inputs) if place.is_a else (num_outputs, rank)
    require(shape == expected, f"shape of adapter tensor {shown}", shape, str(expected))
    return place


def _projection(
    published: str, layout: Layout, names: CheckpointNames
) -> tuple[str, int | None] | None:
    """Our layer for a published projection, and its index among joined ones; None: the model has no
    such layer."""
    try:
        return names.projection(published, layout)
    except ConfigError:
        return None


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
        found.setdefault(place.published, {})[place.is_a] = tensors[name]
        where[place.published] = place
    projections: dict[tuple[str, int], LowRank] = {}
    for published, factors in found.items():
        require(len(factors) == 2, f"adapter of {published}", "one tensor", "lora_A and lora_B")
        for key, low_rank in _split(where[published], factors, config, layout):
            require(key not in projections, f"adapter of {published}", "a second one", "one")
            projections[key] = low_rank
    return projections


def _split(
    place: _Place, factors: Mapping[bool, torch.Tensor], config: AdapterConfig, layout: Layout
) -> Iterator[tuple[tuple[str, int], LowRank]]:
    """The factors of each projection: joined projections share one A."""
    a, b = factors[True], factors[False]
    factor = config.factor_of(place.published)
    require(math.isfinite(factor), f"factor of {place.published}", factor, "a finite number")
    if place.part is not None:
        yield (place.layer, place.part), LowRank(a, b, factor)
        return
    parts = layout[place.layer].parts or (layout[place.layer].shape[0],)
    for i, piece in enumerate(torch.split(b, list(parts))):
        yield (place.layer, i), LowRank(a, piece, factor)
