"""Limits of an engine, by the memory that its KV cache may take."""

from __future__ import annotations

from ...config import EngineConfig
from ...options import BuildRequest, engine_config
from ..model.block_bytes import block_bytes_of, cache_bytes_of


def engine_config_of(request: BuildRequest, kv_cache_memory: int) -> EngineConfig:
    """With a KV cache of so many bytes where the options name neither bytes nor blocks; with 0, of
    the fewest blocks that serve one request. Raises `ConfigError`."""
    options = request.options
    max_model_len = options.max_model_len or request.model.max_position_embeddings
    block_bytes = block_bytes_of(request)
    if kv_cache_memory:
        num_blocks = (options.kv_cache_memory or kv_cache_memory) // cache_bytes_of(request)
    else:
        num_blocks = -(-max_model_len // options.block_size) + 1
    return engine_config(
        options,
        max_model_len,
        options.num_blocks or num_blocks,
        block_bytes=block_bytes,
        window=_window_of(request),
    )


def _window_of(request: BuildRequest) -> int:
    """Positions that all layers see; 0: one sees all. What drafts computes positions that it has
    skipped later, so that it may see others than the served model."""
    drafts = request.draft is not None or request.heads is not None
    return 0 if drafts else request.model.window_of_all
