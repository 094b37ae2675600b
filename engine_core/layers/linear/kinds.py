"""Makes weights of a file's tensors: each linear layer is of the kind that its tensors belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.byte_weights import ByteWeight
from headwater.kernels.quant.int4_layout import Int4Weight
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ...config import ConfigError, require
from ...weights.blocks import BLOCKS, PARTS, Parts, can_cut, stored_parts
from ...weights.byte_weights import Keeps, Kept, keeps_none
from ...weights.grouped import named, weight_of
from ...weights.layout import Layout, Split, WeightSpec
from ...weights.planes import PLANES, stored_planes
from ...weights.shards import WHOLE, Shard
from ..pass_adapters import NoAdapters, PassAdapters
from ..process_group import Alone, Group
from ..routing import ExpertStack
from .blocks import BlockLinear, BlockTable
from .dense import DenseLinear
from .fp8 import Fp8Linear, Fp8TokensLinear
from .int4 import Int4Linear
from .int8 import Int8Linear, W8A8Linear
from .linear import Cut, Linear, StoredLinear
from .mxfp4 import Mxfp4Linear
from .planes import PlanesLinear, PlanesTable

Tensors = Mapping[str, torch.Tensor]
Table = BlockTable | PlanesTable
"""Packed embedding: rows are expanded when they are looked up."""
KINDS: dict[str, type[StoredLinear]] = {
    kind.kind: kind
    for kind in (
        DenseLinear,
        Int4Linear,
        Int8Linear,
        W8A8Linear,
        Fp8Linear,
        Fp8TokensLinear,
        BlockLinear,
        PlanesLinear,
        Mxfp4Linear,
    )
}
"""Kinds that a model's file can hold, or tensors made of it when it is loaded, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model's weights by the names of its layout."""

    linears: Mapping[str, Linear]
    tensors: Mapping[str, torch.Tensor]
    """Embeddings, norms, biases."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    experts: Mapping[str, ExpertStack] = field(default_factory=dict)
    """Weights of all experts of a layer."""
    group: Group = Alone()
    """Ranks that divide the weights."""
    adapters: PassAdapters = NoAdapters()
    """Adapters of the rows of a pass, which its model begins."""

    def table(self, name: str) -> torch.Tensor | Table:
        """An embedding, packed or not."""
        return self.tables[name] if name in self.tables else self.tensors[name]

    def looked_up_by(self, kind: type[Table], look_up: Callable[..., torch.Tensor]) -> Weights:
        """The weights, with that kernel for rows of their packed tables of a kind."""
        changed = {
            name: replace(each, look_up=look_up)
            for name, each in self.tables.items()
            if isinstance(each, kind)
        }
        return replace(self, tables={**self.tables, **changed})


def register(kind: type[StoredLinear]) -> None:
    """Adds a kind. Its suffixes must differ from the suffixes of every other kind."""
    assert all(set(kind.suffixes) != set(known.suffixes) for known in KINDS.values())
    KINDS[kind.kind] = kind


def load_weights(
    layout: Layout,
    tensors: Tensors,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    device: torch.device | None = None,
    ready: Callable[[Tensors], Tensors] | None = None,
) -> Weights:
    """Loads the tensors of a layout. `dtype`: the model's. Of weights that ranks divide, only the
    shard's part is moved to `device`; None: tensors are not moved. `ready` may change the tensors
    of a weight, by suffix, when they are read. Raises `ConfigError` for a tensor that is missing,
    has another shape or dtype, or is not in the layout, and for one that cannot be divided."""
    linears: dict[str, Linear] = {}
    plain: dict[str, torch.Tensor] = {}
    tables: dict[str, Table] = {}
    experts: dict[str, ExpertStack] = {}
    used: set[str] = set()
    for name, spec in layout.items():
        source = spec.tied_to or name
        in_blocks = source + BLOCKS in tensors
        if not (spec.is_linear or in_blocks or source + PLANES in tensors):
            plain[name] = _cut_rows(_tensor(tensors, source, spec.shape), spec, shard).to(device)
            used.add(source)
            continue
        kind = (
            _kind_of(source, tensors)
            if spec.is_linear
            else BlockLinear
            if in_blocks
            else PlanesLinear
        )
        own = _own_tensors(kind, source, spec, tensors, dtype)
        used |= {source + suffix for suffix in own}
        there = _on(device, _cut(kind, own, source, spec, dtype, shard), ready)
        if spec.num_experts:
            joined = _kind_of("", there).load(there, dtype)
            num_ranks = shard.size if spec.split is Split.EXPERTS else 1
            count = spec.num_experts // num_ranks
            num_bytes = sum(tensor.nbytes for tensor in there.values())
            experts[name] = ExpertStack(joined, count, expert_bytes=num_bytes // count)
        elif spec.is_linear:
            linears[name] = _kind_of("", there).load(there, dtype)
        else:
            tables[name] = _table(source, there, dtype)
    for name in tensors.keys() - used:
        raise ConfigError("checkpoint tensor", name, "tensors that config.json announces")
    return Weights(linears=linears, tensors=plain, tables=tables, experts=experts)


def _on(
    device: torch.device | None, tensors: Tensors, ready: Callable[[Tensors], Tensors] | None
) -> Tensors:
    there = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    return there if ready is None else ready(there)


def _table(source: str, tensors: Tensors, dtype: torch.dtype) -> Table:
    """The packed embedding of its tensors by suffix. Raises `ConfigError`."""
    require(
        len(tensors[PARTS]) == 1, f"parts of {source}", len(tensors[PARTS]), "1, as of every table"
    )
    if PLANES in tensors:
        [planes] = stored_planes(tensors[PLANES], tensors[PARTS])
        return PlanesTable(planes, dtype)
    [part] = stored_parts(tensors[BLOCKS], tensors[PARTS])
    return BlockTable(part, dtype)


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
        part = weight_of(_cut(_kind_of("", tensors), tensors, "", spec, weight.scales.dtype, shard))
    except ConfigError:
        return None
    assert not isinstance(part, Int4Weight | Mxfp4Weight)
    return part


def _inputs_of(spec: WeightSpec, shard: Shard) -> range:
    """Range of a weight's inputs that a shard has."""
    num_inputs = spec.shape[1]
    return shard.part(num_inputs) if spec.split is Split.INPUTS else range(num_inputs)


def _cut(
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


def _cut_rows(tensor: torch.Tensor, spec: WeightSpec, shard: Shard) -> torch.Tensor:
    if shard == WHOLE or spec.split is Split.NONE:
        return tensor
    pieces = [tensor[rows.start : rows.stop] for rows in outputs_of(spec, shard)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _own_tensors(
    kind: type[StoredLinear], source: str, spec: WeightSpec, tensors: Tensors, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a weight by suffix. Raises `ConfigError`."""
    suffixes = (*kind.suffixes, *kind.optional_suffixes)
    stored = {suffix: tensors[source + suffix] for suffix in suffixes if source + suffix in tensors}
    if missing := [suffix for suffix in kind.suffixes if suffix not in stored]:
        raise _missing(source + missing[0])
    try:
        parts = {
            part.suffix: part
            for part in kind.parameters(spec.shape[0], spec.shape[1], dtype, stored)
        }
    except ConfigError as error:
        raise error.of(source) from None
    own = {suffix: _tensor(tensors, source + suffix, part.shape) for suffix, part in parts.items()}
    for suffix, part in parts.items():
        if own[suffix].dtype != part.dtype:
            raise ConfigError(
                f"dtype of tensor {source + suffix}", own[suffix].dtype, str(part.dtype)
            )
    return own


def _kind_of(name: str, tensors: Tensors) -> type[StoredLinear]:
    for kind in KINDS.values():
        if all(name + suffix in tensors for suffix in kind.suffixes):
            return kind
    raise _missing(name)


def _tensor(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise _missing(name)
    require(
        tuple(tensor.shape) == shape, f"checkpoint tensor {name}", tuple(tensor.shape), str(shape)
    )
    return tensor


def _missing(name: str) -> ConfigError:
    return ConfigError("checkpoint", f"without {name}", "every tensor of the architecture")
