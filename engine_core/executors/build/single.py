"""The parts that platforms build an executor from: weights, the engine's limits, and the executor
that computes each plan where it is submitted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...config import EngineConfig
from ...executor import Executor
from ...heads.heads_config import HeadsConfig
from ...heads.medusa import Medusa
from ...heads.registry import chain_heads, load_heads
from ...heads.served import Served
from ...layers.group import Alone
from ...layers.leaves import WithLeaves, cut_leaves, of_leaves
from ...layers.linear import kinds
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress, engine_config
from ...weights import model_file
from ...weights.byte_weights import Keeps, keeps_none
from ...weights.dummy import DUMMIES, dummy
from ...weights.layout import Layout
from ...weights.model_file import DTYPES, Tensors
from ...weights.planes import put_all_in_planes
from ...weights.shards import WHOLE, Shard
from ..device.replayed_steps import ReplayedSteps
from ..drafter.chained_heads import ChainedHeads
from ..drafter.device_drafter import DeviceDrafter
from ..drafter.draft_model import DraftModel
from ..drafter.parallel_heads import ParallelHeads
from ..model.block_bytes import KV_DTYPES, block_bytes_of, cache_bytes_of
from ..model.new_cache import NewCache, cache_in, private_cache
from ..model.shared_kv import SharedMemory
from ..runner import Runner
from ..single import SingleExecutor
from ..tiers.memory_swapper import MemorySwapper


def load_weights(
    request: BuildRequest,
    device: torch.device,
    progress: Progress,
    *,
    keeps_packed: bool = False,
    keeps: Keeps = keeps_none,
    in_planes: bool = False,
    with_leaves: WithLeaves = cut_leaves,
) -> Weights:
    """Weights of the model folder, or random ones where the load format says so. Weights in block
    formats and of eight bits are expanded, unless `keeps_packed` or `keeps`, and where products are
    trees: then `with_leaves` makes of them what the platform multiplies. `in_planes`: weights in
    block formats that are kept become planes. Raises `ConfigError`."""
    layout = model_class(request.model).layout(request.model)
    loading = partial(progress, "loading weights")
    if request.is_tree:
        tensors = stored_tensors(request, device, loading, keeps_packed=False)
        return with_leaves(
            kinds.load_weights(layout, tensors, DTYPES[request.dtype]), layout, WHOLE
        )
    tensors = stored_tensors(request, device, loading, keeps_packed=keeps_packed, keeps=keeps)
    if in_planes:
        put_all_in_planes(tensors)
    return kinds.load_weights(layout, tensors, DTYPES[request.dtype])


def stored_tensors(
    request: BuildRequest,
    device: torch.device,
    loading: Callable[[int, int], None],
    *,
    keeps_packed: bool,
    keeps: Keeps = keeps_none,
) -> Tensors:
    """The tensors of the whole model as its file holds them."""
    options = request.options
    assert options.model_folder is not None
    if options.load_format == "auto":
        return model_file.load(
            options.model_folder, device, loading, keeps_packed=keeps_packed, keeps=keeps
        )
    loading(0, 1)
    tensors = random_tensors(
        request,
        model_class(request.model).layout(request.model),
        device,
        keeps_packed=keeps_packed,
        keeps=keeps,
    )
    loading(1, 1)
    return tensors


def random_tensors(
    request: BuildRequest,
    layout: Layout,
    device: torch.device,
    *,
    keeps_packed: bool,
    keeps: Keeps = keeps_none,
) -> Tensors:
    """Random tensors of the weights of a layout."""
    dtype = DTYPES[request.dtype]
    uniform = DUMMIES[request.options.load_format]
    tensors = dummy(layout, dtype, device, uniform=uniform, quantization=request.model.quantization)
    if not keeps_packed:
        model_file.expand_all(tensors, dtype, keeps)
    return tensors


def load_heads_weights(
    request: BuildRequest, device: torch.device, shard: Shard = WHOLE
) -> Weights:
    """Weights of the heads that draft; on a rank with its part of their vocabulary. Raises
    `ConfigError`."""
    folder = request.options.draft_heads
    assert folder is not None
    assert request.heads is not None
    return load_heads(folder, request.heads, request.model, DTYPES[request.dtype], device, shard)


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
        options, max_model_len, options.num_blocks or num_blocks, block_bytes=block_bytes
    )


def single_executor(
    request: BuildRequest,
    config: EngineConfig,
    platform: Platform,
    weights: Weights,
    *,
    draft: tuple[Platform, Weights] | None = None,
    heads: tuple[Platform, Weights] | None = None,
    replays: bool = False,
) -> Executor:
    """Model, KV cache and sampling over the platform's operations; for platforms without launches
    to wait for. `draft` and `heads`: platform and weights of those of the request. `replays`: small
    steps of the served model are recorded; the platform's kernels are the CPU's."""
    served = _model(request, config, platform, weights)
    max_blocks = -(-config.max_model_len // config.block_size)
    forward = ReplayedSteps(served, platform, max_blocks) if replays else None
    memory = SharedMemory() if config.shares_kv_cache and platform.device.type == "cpu" else None
    new_cache = private_cache if memory is None else cache_in(memory)
    runner = Runner(
        served, config, KV_DTYPES[request.kv_format], platform, new_cache=new_cache, forward=forward
    )
    add_drafter(runner, request, config, served, draft=draft, heads=heads, new_cache=new_cache)
    swapper = (
        MemorySwapper.of(runner.kv_caches, config.num_swap_slots, memory)
        if config.num_swap_slots
        else None
    )
    return SingleExecutor(runner, swapper)


def add_drafter(
    runner: Runner,
    request: BuildRequest,
    config: EngineConfig,
    served: Served,
    *,
    draft: tuple[Platform, Weights] | None,
    heads: tuple[Platform, Weights] | None,
    new_cache: NewCache = private_cache,
    shard: Shard = WHOLE,
) -> None:
    """Has the request's draft model or heads guess for the runner, whose model is `served`, if
    there are any."""
    if request.draft is not None:
        assert draft is not None
        kv_dtype = KV_DTYPES[request.draft.kv_format]
        model = _model(request.draft, config, *draft)
        runner.draft_by(
            DraftModel(model, config, kv_dtype, draft[0].device, *runner.tables, new_cache)
        )
    if request.heads is not None:
        assert heads is not None
        runner.draft_by(
            _head_drafter(request.heads, config, served, *heads, runner.tables, new_cache, shard)
        )


def _head_drafter(
    heads: HeadsConfig,
    config: EngineConfig,
    served: Served,
    platform: Platform,
    weights: Weights,
    tables: tuple[torch.Tensor, torch.Tensor],
    new_cache: NewCache,
    shard: Shard,
) -> DeviceDrafter:
    dtype = served.embedding.dtype
    if heads.layer is None:
        medusa = Medusa(heads, weights, platform, served, config.max_model_len)
        return ParallelHeads(medusa, config, dtype, tables[0])
    chained = chain_heads(heads, weights, platform, served, config.max_model_len, shard)
    return ChainedHeads(chained, config, dtype, platform.device, *tables, new_cache)


def _model(
    request: BuildRequest, config: EngineConfig, platform: Platform, weights: Weights
) -> Model:
    if request.is_tree:
        weights = of_leaves(
            weights, model_class(request.model).layout(request.model), platform, Alone()
        )
    return model_class(request.model)(request.model, weights, platform, config.max_model_len)
