"""An executor over a device's operations, which are computed when they return: for one rank of an
engine, which may have the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...config import EngineConfig
from ...executor import Swapper
from ...layers.platform import Platform
from ...layers.sharded_sampling import ShardedSampling
from ...models.model import Model
from ...options import BuildRequest, Progress
from ...platforms.device import Device
from ...sampling.operations import PartSampling
from ...sampling.sampler import Sampler
from ..device.eager import EagerDevice
from ..drafter.eager_drafter import Drafts
from ..entry.eager_entry import EagerEntry, EagerStep, StepBatch
from ..exit.eager_sample import EagerSample
from ..exit.eager_send import EagerSend
from ..model.block_bytes import KV_DTYPES, block_bytes_of
from ..model.eager_caches import EagerCaches
from ..model.eager_layers import EagerLayers, Forward
from ..model.new_cache import cache_in, private_cache
from ..model.shared_kv import SharedMemory
from ..ranks.rank import Rank, block_slice, map_slots
from ..step_executor import StepExecutor
from ..table.eager_table import EagerTable
from ..tiers.memory_swapper import MemorySwapper
from ..tiers.none import NoTiers
from .eager_drafters import Drafted, new_drafter
from .engine_limits import engine_config_of
from .hooks import Hooks
from .loader import Loader
from .models import rank_model, whole_model


def build_eager(
    device: Device, request: BuildRequest, rank: Rank, progress: Progress
) -> tuple[StepExecutor[EagerStep, StepBatch], EngineConfig]:
    """Loads the request's models and puts the parts of their steps together. Raises
    `ConfigError`."""
    config = engine_config_of(request, device.kv_cache_memory(request.options))
    loader = Loader(device, rank, config, progress)
    platform, weights = loader.served(request)
    if rank.is_whole:
        served = whole_model(request, config, (platform, weights))
        max_blocks = -(-config.max_model_len // config.block_size)
        forward = Hooks.of(device).forward_pass(served, platform, max_blocks)
    else:
        served = rank_model(request, rank, config.max_model_len, platform, weights)
        forward = served.forward
    return _executor(request, rank, config, platform, served, forward, loader), config


def _executor(
    request: BuildRequest,
    rank: Rank,
    config: EngineConfig,
    platform: Platform,
    served: Model,
    forward: Forward,
    loader: Loader,
) -> StepExecutor[EagerStep, StepBatch]:
    device = platform.device
    table = EagerTable(config)
    sampler = _sampler(request, rank, config, platform)
    memory = SharedMemory() if config.shares_kv_cache and device.type == "cpu" else None
    new_cache = private_cache if memory is None else cache_in(memory)
    kv_cache = new_cache(cache_shape(served, config), KV_DTYPES[request.kv_format], device)
    drafted = Drafted(
        served=served,
        table=table,
        drafts=Drafts(table, sampler),
        shard=rank.shard,
        new_cache=new_cache,
    )
    drafter = new_drafter(request, config, loader, drafted)
    caches = EagerCaches([kv_cache, *drafter.kv_caches])
    return StepExecutor(
        device=EagerDevice(config, served.config.vocab_size),
        caches=caches,
        entry=EagerEntry(
            table,
            served,
            config,
            device,
            # The next stage goes on with all tokens.
            looks_at_all=drafter.looks_at_all or not rank.stage.is_last,
            most_drafts=drafter.most,
            inputs=drafter.layers,
        ),
        layers=EagerLayers(forward, kv_cache),
        exit=_exit(served, config, table, sampler, device, rank),
        drafter=drafter,
        # Copies are made between steps, where they are asked for.
        tiers=NoTiers(),
        swapper=_swapper(request, rank, config, caches.kv_caches, memory),
    )


def cache_shape(model: Model, config: EngineConfig) -> tuple[int, ...]:
    """[layers, 2, num_blocks, Hk, block_size, D] of a model's KV cache."""
    sizes = model.config
    heads = sizes.num_kv_heads, config.block_size, sizes.head_dim
    return sizes.num_layers, 2, config.num_blocks, *heads


def _sampler(
    request: BuildRequest, rank: Rank, config: EngineConfig, platform: Platform
) -> Sampler:
    """Draws from whole rows of logits, or from this rank's part of them. Drafts of ranks are drawn
    from parts on any platform."""
    sampling = platform.sampling
    if rank.shard.size == 1:
        return Sampler(config.num_rows, sampling, platform.device)
    parts = sampling if isinstance(sampling, PartSampling) else None
    sharded = ShardedSampling(sampling, parts, rank.shard, request.model.vocab_size, rank.group)
    return Sampler(config.num_rows, sharded, platform.device, sharded.whole)


def _swapper(
    request: BuildRequest,
    rank: Rank,
    config: EngineConfig,
    kv_caches: Sequence[torch.Tensor],
    memory: SharedMemory | None,
) -> Swapper | None:
    """Copies blocks to the config's slots and back; None: there are no slots. All ranks have all
    planes of what drafts; the first rank saves them."""
    num_slots = config.num_swap_slots
    if not num_slots:
        return None
    if rank.is_whole:
        return MemorySwapper.of(kv_caches, num_slots, memory)
    return MemorySwapper.of_part(
        kv_caches,
        map_slots(rank.slots, config, block_bytes_of(request)),
        block_slice(request, rank),
        saves_whole_planes=rank.shard.index == 0,
        meet=partial(rank.group.join, torch.zeros(1, 1)),
    )


def _exit(
    served: Model,
    config: EngineConfig,
    table: EagerTable,
    sampler: Sampler,
    device: torch.device,
    rank: Rank,
) -> EagerSample | EagerSend:
    links = rank.links
    if rank.stage.is_last:
        return EagerSample(served, table, sampler, device, links.tokens_out)
    assert links.stream_out is not None
    assert links.tokens_in is not None
    return EagerSend(table, links.stream_out, links.tokens_in, config.most_in_flight)
