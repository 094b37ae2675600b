"""Models on one rank of an engine that several GPUs compute together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from headwater.kernels.stage.stage_memory import StageMemory

from ...config import ConfigError, EngineConfig
from ...executor import UInt8Array
from ...heads.served import Served, ServedPart
from ...layers.adapters.row_adapters import RowAdapters, with_adapters
from ...layers.process_group import Alone, Group
from ...layers.sharded import over_group
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_rank import SummingPlatform
from ...platforms.peer_group import PeerGroup
from ...platforms.stored_weights import StoredWeights
from ...weights.page_plan import PagePlan
from ...weights.shards import Shard
from ..drafter.cuda_drafters import NewDrafter
from ..exit.device_head import DeviceHead, HeadShard, WholeHead
from ..model.adapter_memory import AdapterMemory
from ..model.block_bytes import KV_DTYPES, block_bytes_of
from ..model.kv_blocks import KvBlocks
from ..ranks.gpu_stage import GpuStageEnds, HostStageEnds
from ..ranks.host_stages import HostStages
from ..ranks.rank import Rank, block_slice, map_slots
from ..ranks.rank_adapters import RankAdapters, rank_adapters
from ..ranks.rank_channels import agreed, open_channels
from ..ranks.stage_link import StageEnds
from ..tiers.cuda_swapper import CudaSwapper
from ..tiers.locked_slots import LOCKABLE, RankSlots, check_room, touch
from .cuda_model import LoadedEngine, LoadedModel, load_heads
from .cuda_parts import CudaParts
from .hooks import Hooks
from .models import rank_model
from .rank_weights import HEAD, draft_layout, load_draft_weights, load_rank_weights


@dataclass(frozen=True, slots=True)
class LoadedRank(LoadedModel):
    """This rank's part of a model on its GPU; the config has the shapes of its layers."""

    request: BuildRequest
    rank: Rank
    """The rank, with a group over peer memory, or alone where its stage has no other."""
    group: PeerGroup | None
    host: Group
    """A group of the same ranks that exchanges over host memory."""
    stages: StageMemory | None
    """Memory for messages between stages; None: the engine has one stage."""
    hosts: HostStages | None = None
    """Links to stages on other hosts, if there are any."""

    @property
    def has_head(self) -> bool:
        return self.rank.stage.is_last

    def platform(self, config: EngineConfig) -> CudaPlatform:
        # The norm after a tree is a launch of its own, with the bits of one GPU's.
        adds_products = model_class(self.config).adds_products(self.config)
        if self.group is not None and adds_products and not self.is_tree:
            return SummingPlatform.over(self.group, self.config, config)
        # Not `super()`: with slots, the decorator makes another class of this one.
        return LoadedModel.platform(self, config)

    def with_adapters(
        self, platform: CudaPlatform, num_bytes: int
    ) -> tuple[Self, AdapterMemory | RankAdapters | None]:
        if not num_bytes:
            return self, None
        memory, slab, layout = rank_adapters(self.request, self.rank, platform.device)
        weights = with_adapters(self.weights, layout, RowAdapters(platform, slab))
        return replace(self, weights=weights), memory

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        is_summing = isinstance(platform, SummingPlatform)
        sums: Group = Alone()
        if is_summing:
            assert self.group is not None
            sums = self.group
        ends: StageEnds | None = None
        if self.hosts is not None:
            ends = HostStageEnds(self.hosts.arrived, sums)
        elif self.stages is not None:
            ends = GpuStageEnds(self.stages, sums)
        return rank_model(
            self.request,
            self.rank,
            max_model_len,
            platform,
            self.weights,
            sums_products=not is_summing,
            ends=ends,
        )

    def parts(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        pages: PagePlan,
        blocks: KvBlocks,
        drafting: NewDrafter,
        swapper: CudaSwapper | None,
    ) -> CudaParts:
        return CudaParts(
            decoder,
            platform,
            config,
            pages,
            blocks,
            self.head(decoder, platform),
            drafting,
            swapper=swapper,
            stages=self.stages,
            hosts=self.hosts,
            samples=self.has_head,
        )

    def swapper(self, blocks: KvBlocks, config: EngineConfig) -> CudaSwapper:
        """See `LoadedModel`. All ranks have the same slots, which the first one to map them
        makes."""
        block_bytes = block_bytes_of(self.request)
        layout = self.request.options.layout
        check_room(config.num_swap_slots * block_bytes)
        slots = map_slots(self.rank.slots, config, block_bytes)
        own = self.rank.number(layout)
        touch(torch.from_numpy(slots).view(torch.int32), own, layout.num_ranks)
        # All ranks meet, so that no rank locks pages before they exist.
        self.agreed(0)
        return CudaSwapper(blocks, config.num_swap_slots, self._locked(slots))

    def _locked(self, slots: UInt8Array) -> RankSlots:
        """Locks the memory of the slots. Raises `ConfigError` on all ranks if one of them fails, so
        that no rank waits for it."""
        try:
            locked = RankSlots(slots, block_slice(self.request, self.rank))
        except RuntimeError:
            locked = None
        if not self.agreed(int(locked is not None)) or locked is None:
            raise ConfigError("kv_swap_memory", slots.nbytes, LOCKABLE)
        return locked

    def head(self, decoder: Model, platform: CudaPlatform) -> DeviceHead:
        if self.group is None or not self.has_head:
            return WholeHead(decoder.lm_head)
        return _head_shard(self, decoder, platform, self.rank.shard, self.group)

    def for_heads(self, decoder: Model, platform: CudaPlatform) -> Served:
        head = platform.linear(self.weights.linears[HEAD])
        return ServedPart(decoder.config, decoder.embedding, head)

    def agreed(self, number: int) -> int:
        return agreed(self.host, self.rank.links, number)

    def begin(self) -> None:
        self.agreed(0)


@dataclass(frozen=True, slots=True)
class LoadedRankDraft(LoadedModel):
    """A draft model of which this rank has all layers, and a part of the vocabulary head."""

    request: BuildRequest
    shard: Shard
    group: PeerGroup

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        whole = over_group(
            self.weights, draft_layout(self.request), platform, self.shard, self.group
        )
        return model_class(self.config)(self.config, whole, platform, max_model_len)

    def head(self, decoder: Model, platform: CudaPlatform) -> DeviceHead:
        return _head_shard(self, decoder, platform, self.shard, self.group)


def _head_shard(
    model: LoadedModel, decoder: Model, platform: CudaPlatform, shard: Shard, group: PeerGroup
) -> HeadShard:
    rows = model.weights.linears[HEAD]
    product = platform.linear(rows)
    return HeadShard(decoder.lm_head, rows, product, shard, model.config.vocab_size, group)


def load_rank(
    request: BuildRequest,
    rank: Rank,
    config: EngineConfig,
    device: torch.device,
    progress: Progress,
    hooks: Hooks,
) -> LoadedEngine:
    """Loads a rank's part of the models, and opens its channels to other ranks. Raises
    `ConfigError`."""
    forms = hooks.stored_forms(request)
    weights = load_rank_weights(request, rank, device, progress, forms)
    stored = StoredWeights(request=request, weights=weights, part=rank.part)
    channels = open_channels(request, config, rank)
    group = channels.group
    served = LoadedRank(
        rank.local_config(request.model),
        hooks.prepare_weights(stored, progress),
        KV_DTYPES[request.kv_format],
        request.is_tree,
        request,
        # Host memory takes no tensors of a GPU: a rank that has its layers alone exchanges nothing.
        rank.over(Alone() if group is None else group),
        group,
        rank.group,
        channels.stages,
        channels.hosts,
    )
    # All ranks meet: each writes into the others' memory only after it is mapped.
    served.agreed(0)
    return LoadedEngine(
        served=served,
        draft=_load_draft(request, rank.shard, group, device, progress, hooks),
        heads=load_heads(request, device, rank.shard),
    )


def _load_draft(
    request: BuildRequest,
    shard: Shard,
    group: PeerGroup | None,
    device: torch.device,
    progress: Progress,
    hooks: Hooks,
) -> LoadedModel | None:
    """Loads the draft model, if there is one. Raises `ConfigError`."""
    if (draft := request.draft) is None:
        return None
    weights = load_draft_weights(draft, shard, device, progress, hooks.stored_forms(draft))
    prepared = hooks.prepare_weights(StoredWeights(request=draft, weights=weights), progress)
    what = draft.model, prepared, KV_DTYPES[draft.kv_format], False
    return LoadedModel(*what) if group is None else LoadedRankDraft(*what, draft, shard, group)
