"""Weights of one rank of an engine, and of a draft model on it.

Every rank computes all layers of a draft model or of heads, so no pass waits for another rank.
Ranks divide the vocabulary heads alone, the largest matrices, and the draw of a draft joins each
rank's best token: all ranks take the same one, whatever the last bits of a rank's own pass are, and
their steps stay equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...layers.linear import kinds
from ...layers.linear.division import keeps_divided
from ...layers.linear.kinds import Table, Weights
from ...layers.linear.linear import Linear
from ...layers.routing import ExpertStack
from ...layers.staged import local_names, stage_layout, stage_weights
from ...models.model import model_class
from ...options import BuildRequest, Progress
from ...platforms.stored_weights import StoredForms
from ...weights.byte_weights import Keeps, keeps_none
from ...weights.layout import Layout, Split
from ...weights.model_file import DTYPES
from ...weights.planes import in_planes as as_planes
from ...weights.shards import Shard
from ..ranks.rank import Rank
from .weights import keeps_of, random_tensors, stored_tensors

HEAD = "lm_head"


def _weight_of(tensor_name: str, layout: Layout) -> str:
    """The weight that a tensor of a model's file belongs to, or its own name where it belongs to
    none."""
    return tensor_name if tensor_name in layout else tensor_name.rpartition(".")[0]


def load_rank_weights(
    request: BuildRequest,
    rank: Rank,
    device: torch.device,
    progress: Progress,
    forms: StoredForms,
) -> Weights:
    """Like `weights.load_weights`, for this rank alone: only its part of the folder's mapped
    tensors is read. Weights in block formats become planes where blocks are whole on all ranks;
    other packed weights are expanded, and so are weights of eight bits, unless the forms can keep
    the parts of all ranks. Raises `ConfigError`."""
    layout = model_class(request.model).layout(request.model)
    dtype = DTYPES[request.dtype]
    own = stage_layout(layout, rank.stage)
    others = layout.keys() - own.keys()
    sources = {spec.tied_to or name for name, spec in own.items()}
    # The source of a tied weight is loaded only for the weight tied to it.
    wanted = {**own, **{name: layout[name] for name in others & sources}}
    keeps_packed = forms.keeps_packed and not request.is_tree
    in_planes = forms.in_planes and not request.is_tree
    loading = partial(progress, "loading weights")
    keeps = keeps_divided(layout, rank.shard, keeps_of(layout, forms)) if in_planes else keeps_none
    if request.options.load_format == "auto":
        tensors = stored_tensors(
            request, torch.device("cpu"), loading, keeps_packed=keeps_packed, keeps=keeps
        )
        elsewhere = {name for name in others if name not in sources}
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if _weight_of(name, layout) not in elsewhere
        }
        part = kinds.load_weights(
            wanted, kept, dtype, rank.shard, device, as_planes if in_planes else None
        )
    else:
        part = _random_weights(
            request, rank.shard, wanted, device, loading, keeps_packed=keeps_packed, keeps=keeps
        )
    weights = stage_weights(part, layout, rank.stage, dtype)
    if not request.is_tree:
        return weights
    return forms.with_leaves(weights, local_names(layout, rank.stage), rank.shard)


def _random_weights(
    request: BuildRequest,
    shard: Shard,
    wanted: Layout,
    device: torch.device,
    loading: Callable[[int, int], None],
    *,
    keeps_packed: bool,
    keeps: Keeps,
) -> Weights:
    """Random weights, made where they are used and one whole weight at a time: all of them may be
    more than a device holds."""
    linears: dict[str, Linear] = {}
    tensors: dict[str, torch.Tensor] = {}
    tables: dict[str, Table] = {}
    experts: dict[str, ExpertStack] = {}
    sources = [name for name, spec in wanted.items() if not spec.tied_to]
    for done, source in enumerate(sources, start=1):
        one = {name: spec for name, spec in wanted.items() if source in (name, spec.tied_to)}
        whole = random_tensors(request, one, device, keeps_packed=keeps_packed, keeps=keeps)
        part = kinds.load_weights(one, whole, DTYPES[request.dtype], shard, device)
        linears |= dict(part.linears)
        tensors |= dict(part.tensors)
        tables |= dict(part.tables)
        experts |= dict(part.experts)
        loading(done, len(sources))
    return Weights(linears=linears, tensors=tensors, tables=tables, experts=experts)


def draft_layout(request: BuildRequest) -> Layout:
    """The layout of a draft model of which ranks divide nothing but the vocabulary head."""
    layout = model_class(request.model).layout(request.model)
    return {
        name: spec if name == HEAD else replace(spec, split=Split.NONE)
        for name, spec in layout.items()
    }


def load_draft_weights(
    request: BuildRequest,
    shard: Shard,
    device: torch.device,
    progress: Progress,
    forms: StoredForms,
) -> Weights:
    """Like `load_rank_weights`, for a draft model with this rank's rows of its vocabulary head.
    Raises `ConfigError`."""
    # Tensors of a file are mapped; random ones are made where they are used.
    source = torch.device("cpu") if request.options.load_format == "auto" else device
    layout = draft_layout(request)
    loading = partial(progress, "loading weights")
    keeps = keeps_divided(layout, shard) if forms.in_planes else keeps_none
    tensors = stored_tensors(request, source, loading, keeps_packed=forms.keeps_packed, keeps=keeps)
    return kinds.load_weights(
        layout,
        tensors,
        DTYPES[request.dtype],
        shard,
        device,
        as_planes if forms.in_planes else None,
    )
