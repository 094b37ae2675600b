"""Weights in GGUF's block formats as planes, which a GPU's kernels read. Made when a model is
loaded, on the GPU; a model's file has blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from headwater.kernels.quant.block_formats import FORMATS
from headwater.kernels.quant.block_planes import BlockPlanes, PlaneShape, plane_shapes, planes_of

from ..config import ConfigError
from .blocks import BLOCKS, PARTS, facts_of, stored_parts

PLANES = ".planes"
"""Suffix of the tensor with the planes of all parts of a weight, uint8 [bytes]; `blocks.PARTS` is
stored with it."""
ALIGNMENT = 128
"""Each plane begins at a multiple of so many bytes."""


def num_bytes(facts: Sequence[Sequence[int]]) -> int:
    """Size of the planes of all parts; a part's facts are its type, rows and inputs."""
    return sum(_plane_bytes(shape) for each in facts for shape in _shapes(each).values())


def in_planes(tensors: Mapping[str, torch.Tensor], name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of one weight, those in blocks as planes on the same device. Raises
    `ConfigError`."""
    if name + BLOCKS not in tensors:
        return dict(tensors)
    blocks = tensors[name + BLOCKS]
    parts = tensors[name + PARTS]
    whole = torch.empty(num_bytes(facts_of(parts)), dtype=torch.uint8, device=blocks.device)
    kept = {name + PLANES: whole, name + PARTS: parts}
    for written, part in zip(stored_planes(whole, parts), stored_parts(blocks, parts), strict=True):
        made = planes_of(part)
        for field in fields(BlockPlanes):
            if isinstance(plane := getattr(made, field.name), torch.Tensor):
                getattr(written, field.name).copy_(plane)
    return kept


def put_all_in_planes(tensors: dict[str, torch.Tensor]) -> None:
    """Puts every weight of a model's tensors that is in blocks into planes, one after another.
    Raises `ConfigError`."""
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        own = {name + suffix: tensors.pop(name + suffix) for suffix in (BLOCKS, PARTS)}
        try:
            tensors |= in_planes(own, name)
        except ConfigError as error:
            raise error.of(name) from None


def stored_planes(planes: torch.Tensor, parts: torch.Tensor) -> tuple[BlockPlanes, ...]:
    """The parts of a weight, views of its tensors. Raises `ConfigError`."""
    facts = facts_of(parts)
    if planes.dtype != torch.uint8 or tuple(planes.shape) != (num_bytes(facts),):
        raise ConfigError(
            "planes of weights",
            (str(planes.dtype), tuple(planes.shape)),
            f"uint8, ({num_bytes(facts)},)",
        )
    found = []
    at = 0
    for each in facts:
        views: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in _shapes(each).items():
            size = math.prod(shape) * dtype.itemsize
            views[name] = planes[at : at + size].view(dtype).view(shape)
            at += _plane_bytes((shape, dtype))
        empty = dict.fromkeys(field.name for field in fields(BlockPlanes) if field.name != "format")
        found.append(BlockPlanes(format=FORMATS[each[0]], **(empty | views)))  # type: ignore[arg-type]
    return tuple(found)


def _shapes(facts: Sequence[int]) -> dict[str, PlaneShape]:
    return plane_shapes(FORMATS[facts[0]], facts[1], facts[2])


def _plane_bytes(plane: PlaneShape) -> int:
    shape, dtype = plane
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
