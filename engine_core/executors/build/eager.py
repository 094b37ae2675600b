"""Builds the executor of a platform whose operations are complete when they return, for one rank of
an engine or for the only one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from ...config import EngineConfig
from ...executor import Swapper
from ...layers.adapters.row_adapters import AdapterPlatform, RowAdapters, with_adapters
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...layers.sharded_sampling import ShardedSampling
from ...models.foreign.model import ForeignModel
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress
from ...platforms.device import Device
from ...sampling.operations import PartSampling
from ...sampling.sampler import Sampler
from ...weights.model_file import DTYPES
from ...weights.page_plan import PagePlan, one_group
from ..device.eager import EagerDevice
from ..device.mapped_weights import MappedWeights
from ..drafter.eager_drafter import Drafts
from ..entry.eager_entry import EagerEntry, EagerStep, StepBatch
from ..entry.eager_states import EagerStates, NoStates
from ..exit.eager_sample import EagerSample
from ..exit.eager_send import EagerSend
from ..model.adapter_memory import AdapterMemory, NoAdapterMemory, adapter_memory
from ..model.block_bytes import block_bytes_of, kv_layouts, states_of
from ..model.eager_caches import EagerCaches
from ..model.eager_layers import EagerLayers, Forward
from ..model.expert_counts import expert_counts_of
from ..model.kv_blocks import KvBlocks, layer_caches
from ..model.shared_kv import SharedCopies, SharedMemory
from ..ranks.rank import Rank, block_slice, map_slots
from ..ranks.rank_adapters import RankAdapters, rank_adapters
from ..step_executor import StepExecutor
from ..table.eager_table import EagerTable
from ..tiers.memory_swapper import MemorySwapper
from ..tiers.none import NoTiers
from .eager_drafters import Drafted, new_drafter
from .engine_limits import engine_config_of, pages_of_request
from .hooks import Hooks
from .loader import Loader
from .models import rank_model, whole_model
from .new_weights import EagerWeights, why_not

log = logging.getLogger(__name__)


def build_eager(
    device: Device, request: BuildRequest, rank: Rank, progress: Progress
) -> tuple[StepExecutor[EagerStep, StepBatch], EngineConfig]:
    """Loads the request's models and puts the parts of their steps together. Raises
    `ConfigError`."""
    pages = pages_of_request(request)
    config = engine_config_of(request, device.kv_cache_memory(request.options), pages)
    sizes = config.page_sizes.described(config.page_kinds, config.state_pages)
    log.info("kv cache: %d %s%s", config.num_blocks, sizes, pages.described)
    loader = Loader(device, rank, config, progress)
    platform, weights = loader.served(request)
    weights, adapters = _with_adapters(request, rank, platform, weights)
    if adapters is not None:
        config = replace(config, num_adapter_ranks=adapters.num_ranks)
    if rank.is_whole:
        served = whole_model(request, config, (platform, weights))
        if isinstance(served, ForeignModel):
            served.check_rows()
        forward = Hooks.of(device).forward_pass(served, platform, config.max_blocks)
    else:
        served = rank_model(request, rank, config.max_model_len, platform, weights)
        forward = served.forward
    executor = _executor(request, rank, config, pages, platform, served, forward, loader, adapters)
    return executor, config


def _with_adapters(
    request: BuildRequest, rank: Rank, platform: Platform, weights: Weights
) -> tuple[Weights, AdapterMemory | RankAdapters | None]:
    """The weights with adapters behind them, and the adapters' memory, if the engine takes
    any."""
    num_bytes = request.options.adapter_memory
    if not num_bytes:
        return weights, None
    adapting = cast(AdapterPlatform, platform)
    dtype = DTYPES[request.dtype]
    memory: AdapterMemory | RankAdapters
    if rank.is_whole:
        found = model_class(request.model)
        model_layout = found.layout(request.model)
        memory, slab, layout = adapter_memory(
            num_bytes, model_layout, found.names, dtype, platform.device
        )
    else:
        memory, slab, layout = rank_adapters(request, rank, platform.device)
    rows = RowAdapters(adapting, slab)
    return with_adapters(weights, layout, rows), memory


def _executor(
    request: BuildRequest,
    rank: Rank,
    config: EngineConfig,
    pages: PagePlan,
    platform: Platform,
    served: Model,
    forward: Forward,
    loader: Loader,
    adapters: AdapterMemory | RankAdapters | None,
) -> StepExecutor[EagerStep, StepBatch]:
    device = platform.device
    table = EagerTable(config)
    sampler = _sampler(request, rank, config, platform)
    blocks, copies = _blocks(request, rank, config, pages, device)
    own_caches = blocks.kv_caches[1:]
    drafted = Drafted(
        served=served,
        table=table,
        drafts=Drafts(table, sampler),
        shard=rank.shard,
        kv_caches=own_caches,
    )
    drafter = new_drafter(request, config, loader, drafted)
    local = rank.local_config(request.model)
    if not (rank.stage.is_first and rank.stage.is_last):
        pages = one_group(local)
    sets = states_of(request, pages, local)
    entry = EagerEntry(
        table,
        served,
        config,
        device,
        # The next stage goes on with all tokens.
        looks_at_all=drafter.looks_at_all or not rank.stage.is_last,
        most_drafts=drafter.most,
        inputs=drafter.layers,
        group_of_layer=pages.group_of_layer,
        states=NoStates() if sets is None else EagerStates(table, config, sets, blocks.memory),
    )
    layers = EagerLayers(forward, layer_caches(blocks, pages, served.config))
    exit_ = _exit(served, config, table, sampler, device, rank)
    releasable = _releasable(request)
    replaceable: EagerWeights | str = why_not(request, rank)
    if not replaceable:
        assert isinstance(exit_, EagerSample)
        replaceable = EagerWeights(request, config, rank, entry, layers, exit_, releasable)
    return StepExecutor(
        device=EagerDevice(config, served.config.vocab_size),
        caches=EagerCaches(blocks),
        entry=entry,
        layers=layers,
        exit=exit_,
        drafter=drafter,
        # Copies run between steps.
        tiers=NoTiers(),
        adapters=adapters or NoAdapterMemory(),
        # Those of several ranks are their executor's.
        host_adapters=adapters if isinstance(adapters, AdapterMemory) else None,
        swapper=_swapper(request, rank, config, blocks, copies),
        expert_counts=expert_counts_of(served),
        releasable=releasable,
        replaceable=replaceable,
    )


def _releasable(request: BuildRequest) -> MappedWeights | None:
    """Weights that sleep gives back, if the engine takes turns."""
    options = request.options
    folders = [options.model_folder, options.draft_model, options.draft_heads]
    if not options.takes_turns:
        return None
    return MappedWeights([folder for folder in folders if folder is not None])


def _blocks(
    request: BuildRequest,
    rank: Rank,
    config: EngineConfig,
    pages: PagePlan,
    device: torch.device,
) -> tuple[KvBlocks, SharedCopies | None]:
    """The rank's KV blocks, and the copies that other engines of this host make of them, if they
    may."""
    layouts = kv_layouts(request, pages, rank.local_config(request.model))
    if not (config.shares_kv_cache and device.type == "cpu"):
        local = rank.local_config(request.model)
        num_bytes = 0 if local.states is None else block_bytes_of(request, pages, local)
        blocks = KvBlocks.allocated(
            layouts, config.num_blocks, config.block_size, device, least_bytes=num_bytes
        )
        return blocks, None
    memory = SharedMemory(config.num_blocks, block_bytes_of(request, pages))
    blocks = KvBlocks(layouts, config.block_size, torch.from_numpy(memory.blocks))
    return blocks, SharedCopies(memory)


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
    blocks: KvBlocks,
    copies: SharedCopies | None,
) -> Swapper | None:
    """Copies blocks to the config's slots and back; None: there are no slots. Every rank has all
    keys and values of what drafts; the first rank saves them."""
    num_slots = config.num_swap_slots
    if not num_slots:
        return None
    if rank.is_whole:
        return MemorySwapper.of(blocks.memory, num_slots, copies)
    return MemorySwapper.of_part(
        blocks,
        map_slots(rank.slots, config, block_bytes_of(request)),
        block_slice(request, rank),
        saves_drafts=rank.shard.index == 0,
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
    return EagerSend(table, links.stream_out, links.tokens_in, config.most_in_flight)
