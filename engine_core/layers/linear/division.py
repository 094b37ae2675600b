"""Parts of weights that ranks have, of every kind of linear layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.byte_weights import ByteWeight
from headwater.kernels.quant.int4_layout import Int4Weight
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ...config import ConfigError
from ...weights.blocks import Parts, can_cut
from ...weights.byte_weights import Keeps, Kept, keeps_none
from ...weights.grouped import named, weight_of
from ...weights.layout import Layout, Split, WeightSpec
from ...weights.shards import WHOLE, Shard
from .kind_table import kind_of
from .linear import Cut, StoredLinear


def outputs_of(spec: WeightSpec, shard: Shard) -> tuple[range, ...]:
    """Ranges of a weight's rows that a shard has, in their order."""
    num_rows = spec.shape[0]
    if shard == WHOLE or spec.split in (Split.NONE, Split.INPUTS):
        return (range(num_rows),)
    if spec.split is Split.VOCABULARY:
        return (shard.vocabulary(num_rows),)
    if spec.split is Split.EXPERTS:
        return (shard.part(num_rows),)
    found = []
    first = 0
    for i, size in enumerate(spec.pieces):
        part = shard.rows(spec, i)
        found.append(range(first + part.start, first + part.stop))
        first += size
    return tuple(found)


def keeps_divided(layout: Layout, shard: Shard, keeps_bytes: Keeps = keeps_none) -> Keeps:
    """Keeps weights in block formats and in MXFP4 whose parts of every rank are whole in blocks,
    and those of eight bits that `keeps_bytes` keeps as well as the parts of every rank. All ranks
    decide alike about a weight."""
    ranks = [Shard(index, shard.size) for index in range(shard.size)]

    def keeps(name: str, weight: Kept) -> bool:
        if name not in layout:
            return False
        if isinstance(weight, tuple):
            return all(_keeps_blocks(weight, layout[name], rank) for rank in ranks)
        if not keeps_bytes(name, weight):
            return False
        if isinstance(weight, Mxfp4Weight):
            inputs = [_inputs_of(layout[name], rank) for rank in ranks]
            return all(each.start % mxfp4.BLOCK == each.stop % mxfp4.BLOCK == 0 for each in inputs)
        parts = [_part_of_bytes(weight, layout[name], rank) for rank in ranks]
        return all(part is not None and keeps_bytes(name, part) for part in parts)

    return keeps


def _keeps_blocks(weight: Parts, spec: WeightSpec, shard: Shard) -> bool:
    outputs = outputs_of(spec, shard)
    return any(map(len, outputs)) and can_cut(weight, outputs, _inputs_of(spec, shard))


def _part_of_bytes(weight: ByteWeight, spec: WeightSpec, shard: Shard) -> ByteWeight | None:
    """A rank's part, without its values; None: the weight cannot be divided so."""
    tensors = named(replace(weight, values=weight.values.to("meta")), "")
    try:
        part = weight_of(
            cut_tensors(kind_of("", tensors), tensors, "", spec, weight.scales.dtype, shard)
        )
    except ConfigError:
        return None
    assert not isinstance(part, Int4Weight | Mxfp4Weight)
    return part


def _inputs_of(spec: WeightSpec, shard: Shard) -> range:
    """Range of a weight's inputs that a shard has."""
    num_inputs = spec.shape[1]
    return shard.part(num_inputs) if spec.split is Split.INPUTS else range(num_inputs)


def cut_tensors(
    kind: type[StoredLinear],
    own: dict[str, torch.Tensor],
    source: str,
    spec: WeightSpec,
    dtype: torch.dtype,
    shard: Shard,
) -> dict[str, torch.Tensor]:
    """The shard's part of a weight's tensors by suffix. Raises `ConfigError`."""
    if shard == WHOLE or spec.split is Split.NONE:
        return own
    num_outputs, num_inputs = spec.shape
    cut = Cut(outputs=outputs_of(spec, shard), inputs=_inputs_of(spec, shard))
    try:
        return kind.cut(own, (num_outputs, num_inputs), dtype, cut)
    except ConfigError as error:
        raise (_of_experts(error) if spec.num_experts else error).of(source) from None


def _of_experts(error: ConfigError) -> ConfigError:
    """An error about the share of every expert that a rank has."""
    return ConfigError(error.name, error.value, f"{error.allowed}; or --expert-parallel")


def cut_rows(tensor: torch.Tensor, spec: WeightSpec, shard: Shard) -> torch.Tensor:
    """The shard's rows of a tensor that no linear layer has."""
    if shard == WHOLE or spec.split is Split.NONE:
        return tensor
    pieces = [tensor[rows.start : rows.stop] for rows in outputs_of(spec, shard)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
