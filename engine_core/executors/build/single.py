"""The parts that platforms build an executor from: weights, the engine's limits, and the executor
that computes each plan where it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...config import EngineConfig
from ...executor import Executor, Swapper
from ...heads.registry import load_heads
from ...layers.leaves import WithLeaves, cut_leaves
from ...layers.linear import kinds
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...models.model import model_class
from ...options import BuildRequest, Progress, engine_config
from ...weights import model_file
from ...weights.byte_weights import Keeps, keeps_none
from ...weights.dummy import DUMMIES, dummy
from ...weights.layout import Layout
from ...weights.model_file import DTYPES, Tensors
from ...weights.planes import put_all_in_planes
from ...weights.shards import WHOLE, Shard
from ..device.replayed_steps import ReplayedSteps
from ..model.block_bytes import block_bytes_of, cache_bytes_of
from ..model.new_cache import cache_in, private_cache
from ..model.shared_kv import SharedMemory
from ..tiers.memory_swapper import MemorySwapper
from .eager import Drafting, Loaded, eager_executor, whole_model


def expert_names(request: BuildRequest) -> frozenset[str]:
    """Names of a model's weights of experts."""
    layout = model_class(request.model).layout(request.model)
    return frozenset(name for name, spec in layout.items() if spec.num_experts)


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
    draft: Loaded | None = None,
    heads: Loaded | None = None,
    replays: bool = False,
) -> Executor:
    """Model, KV cache and sampling over the platform's operations; for platforms without launches
    to wait for. `draft` and `heads`: platform and weights of those of the request. `replays`: small
    steps of the served model are recorded; the platform's kernels are the CPU's."""
    served = whole_model(request, config, (platform, weights))
    max_blocks = -(-config.max_model_len // config.block_size)
    memory = SharedMemory() if config.shares_kv_cache and platform.device.type == "cpu" else None

    def new_swapper(kv_caches: Sequence[torch.Tensor]) -> Swapper | None:
        num_slots = config.num_swap_slots
        return MemorySwapper.of(kv_caches, num_slots, memory) if num_slots else None

    return eager_executor(
        request,
        config,
        platform,
        served,
        Drafting(draft=draft, heads=heads),
        new_swapper=new_swapper,
        new_cache=private_cache if memory is None else cache_in(memory),
        forward=ReplayedSteps(served, platform, max_blocks) if replays else None,
    )
