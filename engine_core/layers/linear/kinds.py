"""Makes weights of a file's tensors: each linear layer is of the kind that its tensors belong
to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ...config import ConfigError, require
from ...weights.blocks import BLOCKS, PARTS, stored_parts
from ...weights.layout import Layout, Split, WeightSpec
from ...weights.planes import PLANES, stored_planes
from ...weights.shards import WHOLE, Shard
from ..pass_adapters import NoAdapters, PassAdapters
from ..process_group import Alone, Group
from ..routing import ExpertStack
from .blocks import BlockLinear, BlockTable
from .division import cut_rows, cut_tensors
from .kind_table import Tensors, kind_of, missing
from .linear import Linear, StoredLinear
from .planes import PlanesLinear, PlanesTable

Table = BlockTable | PlanesTable
"""Packed embedding: rows are expanded when they are looked up."""


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
            plain[name] = cut_rows(_tensor(tensors, source, spec.shape), spec, shard).to(device)
            used.add(source)
            continue
        kind = (
            kind_of(source, tensors)
            if spec.is_linear
            else BlockLinear
            if in_blocks
            else PlanesLinear
        )
        own = _own_tensors(kind, source, spec, tensors, dtype)
        used |= {source + suffix for suffix in own}
        there = _on(device, cut_tensors(kind, own, source, spec, dtype, shard), ready)
        if spec.num_experts:
            joined = kind_of("", there).load(there, dtype)
            num_ranks = shard.size if spec.split is Split.EXPERTS else 1
            count = spec.num_experts // num_ranks
            num_bytes = sum(tensor.nbytes for tensor in there.values())
            experts[name] = ExpertStack(joined, count, expert_bytes=num_bytes // count)
        elif spec.is_linear:
            linears[name] = kind_of("", there).load(there, dtype)
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


def _own_tensors(
    kind: type[StoredLinear], source: str, spec: WeightSpec, tensors: Tensors, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a weight by suffix. Raises `ConfigError`."""
    suffixes = (*kind.suffixes, *kind.optional_suffixes)
    stored = {suffix: tensors[source + suffix] for suffix in suffixes if source + suffix in tensors}
    if absent := [suffix for suffix in kind.suffixes if suffix not in stored]:
        raise missing(source + absent[0])
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


def _tensor(tensors: Tensors, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise missing(name)
    require(
        tuple(tensor.shape) == shape, f"checkpoint tensor {name}", tuple(tensor.shape), str(shape)
    )
    return tensor
