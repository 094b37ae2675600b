"""Layouts and sizes of KV blocks, by what a request of a platform asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.kernels.states.set_layout import SetLayout

from ...options import BuildRequest
from ...page_groups import PageSizes
from ...weights.model_config import ModelConfig
from ...weights.model_file import DTYPES
from ...weights.page_plan import PagePlan
from ...weights.shards import num_copies
from .kv_blocks import KvLayout

KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


def kv_layouts(
    request: BuildRequest, pages: PagePlan | None = None, served: ModelConfig | None = None
) -> list[KvLayout]:
    """Layouts of the served model and of the model or the heads that draft. `pages`: page groups;
    None: one. `served`: shapes of a rank's part of the served model; None: the whole model."""
    model = request.model if served is None else served
    return [KvLayout.of(model, KV_DTYPES[request.kv_format], pages), *_draft_layouts(request)]


def block_bytes_of(
    request: BuildRequest, pages: PagePlan | None = None, served: ModelConfig | None = None
) -> int:
    """Bytes of one page: of the served model, and of the drafter; with state layers those of
    `states_of`. `served`: see `kv_layouts`."""
    states = states_of(request, pages, served)
    if states is not None:
        return states.page_bytes
    return _bytes_of(request, kv_layouts(request, pages, served))


def states_of(
    request: BuildRequest, pages: PagePlan | None = None, served: ModelConfig | None = None
) -> SetLayout | None:
    """State sets of the served model in pages; None: it has no state layers. `served`: see
    `kv_layouts`."""
    model = request.model if served is None else served
    kv_bytes = _bytes_of(request, kv_layouts(request, pages, served))
    return set_layout(model, kv_bytes, request.options.block_size, DTYPES[request.dtype])


def set_layout(
    model: ModelConfig, kv_bytes: int, block_size: int, dtype: torch.dtype
) -> SetLayout | None:
    """State sets of a model of this dtype in pages that hold `kv_bytes` of keys and values; None:
    it has no state layers."""
    if model.states is None:
        return None
    sizes = model.states.set_sizes(block_size, dtype.itemsize)
    return SetLayout.beside(sizes, kv_bytes, block_size)


def page_sizes_of(
    request: BuildRequest, pages: PagePlan, parts: Sequence[ModelConfig]
) -> PageSizes:
    """Sizes of pages in the memory of all ranks, of which `parts` are the shapes by stage."""
    layouts = kv_layouts(request, pages)
    served, *drafted = (each.block_bytes(request.options.block_size) for each in layouts)
    place_bytes = served // max(1, layouts[0].num_layers)
    num_shards = request.options.tensor_parallel_size
    place_bytes *= num_copies(request.model, num_shards)
    filled = tuple(
        count * place_bytes + num_shards * sum(drafted)
        for count in pages.filled_places(request.model)
    )
    if request.model.states is None:
        has_latents = layouts[0].has_latents
        return PageSizes(cache_bytes_of(request, pages), filled, has_latents=has_latents)
    element_size = DTYPES[request.dtype].itemsize
    of_set = num_shards * sum(
        each.states.set_sizes(request.options.block_size, element_size).num_bytes
        for each in parts
        if each.states is not None
    )
    return PageSizes(_state_page_bytes(request, pages, parts), filled, of_set)


def cache_bytes_of(
    request: BuildRequest, pages: PagePlan, parts: Sequence[ModelConfig] = ()
) -> int:
    """Bytes of a page in the memory of all ranks. Each rank has the keys and values of some heads
    of the served model, or all latents, and all keys and values of the drafter. `parts`: shapes of
    the ranks of each stage, of a model with states."""
    if request.model.states is not None:
        return _state_page_bytes(request, pages, parts)
    num_shards = request.options.tensor_parallel_size
    drafted = _bytes_of(request, _draft_layouts(request))
    served = block_bytes_of(request, pages) - drafted
    return num_copies(request.model, num_shards) * served + num_shards * drafted


def _state_page_bytes(request: BuildRequest, pages: PagePlan, parts: Sequence[ModelConfig]) -> int:
    """Bytes of a page in the memory of all ranks, of a model with states: that of a rank fits its
    own state sets."""
    own = pages if len(parts) == 1 else None
    num_shards = request.options.tensor_parallel_size
    return num_shards * sum(block_bytes_of(request, own, each) for each in parts)


def _bytes_of(request: BuildRequest, layouts: list[KvLayout]) -> int:
    return sum(each.block_bytes(request.options.block_size) for each in layouts)


def _draft_layouts(request: BuildRequest) -> list[KvLayout]:
    """Layouts of the drafter's KV caches; empty where it has none."""
    if request.draft is not None:
        return kv_layouts(request.draft)
    if request.heads is None or request.heads.layer is None:
        return []
    return [KvLayout.of(request.heads.layer, DTYPES[request.dtype])]
