"""The parts that platforms build an executor from: weights, the engine's limits, and the executor that computes each
plan where it is submitted."""

from __future__ import annotations

from functools import partial

import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.runner import Runner
from headwater.engine_core.executors.single import SingleExecutor
from headwater.engine_core.layers import kinds
from headwater.engine_core.layers.kinds import Weights
from headwater.engine_core.layers.platform import Platform
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import Model
from headwater.engine_core.options import BuildRequest, Progress, engine_config
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import DUMMIES, dummy
from headwater.engine_core.weights.model_file import DTYPES

KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


def load_weights(request: BuildRequest, device: torch.device, progress: Progress) -> Weights:
    """Those of the model folder, or random ones where the load format says so. Raises `ConfigError`."""
    options, loading = request.options, partial(progress, "loading weights")
    layout, dtype = registry.model_class(request.model).layout(request.model), DTYPES[request.dtype]
    assert options.model_folder is not None
    if options.load_format == "auto":
        tensors = model_file.load(options.model_folder, device, loading)
    else:
        tensors = dummy(layout, dtype, device, uniform=DUMMIES[options.load_format])
        loading(1, 1)
    return kinds.load_weights(layout, tensors, dtype)


def engine_config_of(request: BuildRequest, kv_cache_memory: int) -> EngineConfig:
    """With a KV cache of so many bytes where the options name neither bytes nor blocks; with 0, of the fewest blocks
    that serve one request. Raises `ConfigError`."""
    options = request.options
    max_model_len = options.max_model_len or request.model.max_position_embeddings
    block_bytes = block_bytes_of(request)
    if kv_cache_memory:
        num_blocks = (options.kv_cache_memory or kv_cache_memory) // block_bytes
    else:
        num_blocks = -(-max_model_len // options.block_size) + 1
    return engine_config(options, max_model_len, options.num_blocks or num_blocks, block_bytes=block_bytes)


def block_bytes_of(request: BuildRequest) -> int:
    """The bytes of one KV block: planes of the model, and those of the model that drafts."""
    own = request.model.kv_elements_per_token * request.options.block_size * KV_DTYPES[request.kv_format].itemsize
    return own if request.draft is None else own + block_bytes_of(request.draft)


def single_executor(
    request: BuildRequest,
    config: EngineConfig,
    platform: Platform,
    weights: Weights,
    *,
    draft: tuple[Platform, Weights] | None = None,
) -> Executor:
    """Model, KV cache and sampling over the platform's operations; for platforms without launches to wait for. `draft`:
    platform and weights of `request.draft`."""
    runner = Runner(_model(request, config, platform, weights), config, KV_DTYPES[request.kv_format], platform)
    if request.draft is not None:
        assert draft is not None
        runner.draft_by(_model(request.draft, config, *draft), KV_DTYPES[request.draft.kv_format])
    return SingleExecutor(runner)


def _model(request: BuildRequest, config: EngineConfig, platform: Platform, weights: Weights) -> Model:
    return registry.model_class(request.model)(request.model, weights, platform, config.max_model_len)
