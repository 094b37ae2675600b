"""Weights in GGUF's block formats that are integers in groups, Q4_0 and Q8_0, as such: the same numbers, for platforms
whose products read those."""

from __future__ import annotations

import torch

from headwater.kernels import int4_layout
from headwater.kernels.block_formats import BLOCK, Q4_0, Q8_0, read_scales, read_values
from headwater.kernels.byte_weights import Int8Weight
from headwater.kernels.int4_layout import Int4Weight

from . import byte_weights, int4
from .blocks import BLOCKS, PARTS, Parts, stored_parts
from .byte_weights import Keeps


def regroup_all(tensors: dict[str, torch.Tensor], keeps: Keeps) -> None:
    """Puts every weight of a model's file that a platform keeps so into integers in groups, one after another. Raises
    `ConfigError`."""
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        if name + PARTS not in tensors:
            # What expands the rest names it.
            continue
        weight = regrouped(stored_parts(tensors[name + BLOCKS], tensors[name + PARTS]))
        if weight is None or not keeps(name, weight):
            continue
        del tensors[name + BLOCKS], tensors[name + PARTS]
        tensors |= int4.named(weight, name) if isinstance(weight, Int4Weight) else byte_weights.named(weight, name)


def regrouped(parts: Parts) -> Int4Weight | Int8Weight | None:
    """The weight [N, K] of parts in one format; None: it is no matrix of integers in groups."""
    format = parts[0].format
    if format not in (Q4_0, Q8_0) or any(part.format != format for part in parts):
        return None
    values, scales = [], []
    for part in parts:
        scale = read_scales(part.tiles, format).scale
        values.append(read_values(part.tiles, format).flatten(0, 1)[: part.num_rows])
        scales.append(scale.flatten(0, 1)[: part.num_rows])
    # A scale is a float16 number.
    of_groups = torch.cat(scales).t().half().contiguous()
    zeros = torch.full_like(of_groups, format.offset, dtype=torch.uint8)
    assert format.unit == BLOCK
    if format == Q8_0:
        return Int8Weight(values=torch.cat(values), scales=of_groups, zeros=zeros)
    return Int4Weight(words=int4_layout.pack(torch.cat(values)), scales=of_groups, zeros=zeros)
