"""Limits of an engine, by the memory that its KV cache may take."""

from __future__ import annotations

from dataclasses import replace

from ...config import MOST_SETS, ConfigError, EngineConfig
from ...models.model import reads_page_groups
from ...options import BuildRequest, engine_config
from ...weights.model_config import ModelConfig
from ...weights.page_plan import PagePlan, one_group
from ...weights.shards import local_config
from ..model.block_bytes import block_bytes_of, cache_bytes_of, page_sizes_of, states_of
from ..ranks.rank import stages_of
from .pages import pages_of


def pages_of_request(request: BuildRequest) -> PagePlan:
    """Page groups of the served model."""
    has_groups = reads_page_groups(request.model)
    max_model_len = _max_model_len(request)
    return pages_of(
        request.options,
        request.model,
        max_model_len,
        has_groups=has_groups,
        pulls_kinds=request.pulls_kinds,
    )


def engine_config_of(
    request: BuildRequest, kv_cache_memory: int, pages: PagePlan | None = None
) -> EngineConfig:
    """Limits of an engine whose KV cache has so many bytes where the options name neither bytes nor
    blocks; with 0, enough blocks for one request. `pages`: page groups; None: one. Raises
    `ConfigError`."""
    options = request.options
    pages = one_group(request.model) if pages is None else pages
    max_model_len = _max_model_len(request)
    parts = state_parts(request)
    shapes = [states_of(request, None if len(parts) > 1 else pages, each) for each in parts]
    state_pages = max((0 if each is None else each.num_pages for each in shapes), default=0)
    if kv_cache_memory:
        num_bytes = options.kv_cache_memory or kv_cache_memory
        page_bytes = cache_bytes_of(request, pages, parts)
        num_blocks = num_bytes // (pages.num_groups * page_bytes)
    else:
        num_blocks = -(-max_model_len // options.block_size) + 1
        num_blocks += -(-state_pages * (options.async_depth + MOST_SETS) // pages.num_groups)
    config = engine_config(
        options,
        max_model_len,
        options.num_blocks or num_blocks,
        block_bytes=block_bytes_of(request, pages),
        page_windows=pages.windows,
        state_pages=state_pages,
        attention_pivot=attention_pivot_of(request.model),
    )
    return replace(config, page_sizes=page_sizes_of(request, pages, parts))


def state_parts(request: BuildRequest) -> list[ModelConfig]:
    """The shapes of the ranks of each pipeline stage, of a model with states: a state set has pages
    for those of any rank. Raises `ConfigError` where a stage has no layer with keys and values."""
    states = request.model.states
    count = request.options.pipeline_parallel_size
    if states is None:
        return [request.model]
    # All shards of a stage have the same shapes.
    shard = request.options.layout.shard(0)
    if count == 1:
        return [local_config(request.model, shard)]
    stages = stages_of(request)
    for each in stages:
        if all(states.is_state[each.first : each.stop]):
            layers = f"layers {each.first} to {each.stop - 1} are a stage and all keep states"
            allowed = f"so many that each stage has a layer with keys and values: {layers}"
            raise ConfigError("pipeline_parallel_size", count, allowed)
    parts = [request.model.of_layers(each.first, each.stop) for each in stages]
    return [local_config(each, shard) for each in parts]


def attention_pivot_of(model: ModelConfig) -> int:
    """Context length at which attention takes as many multiplications a token as the products with
    weights: about the length at which both take equally long."""
    return round(1 / model.attention_work)


def _max_model_len(request: BuildRequest) -> int:
    return request.options.max_model_len or request.model.max_position_embeddings
