"""The executor of one rank of an engine that several GPUs compute together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.kernels.gemm import int4_gemm
from headwater.kernels.stage.stage_memory import StageMemory

from ...config import ConfigError, EngineConfig
from ...executor import UInt8Array
from ...heads.served import Served, ServedPart
from ...layers.group import Group
from ...layers.leaf_matrix import keep_leaves
from ...layers.linear.ordered import order_linears
from ...layers.sharded import over_group
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_packed import with_look_up
from ...platforms.cuda_rank import SummingPlatform
from ...platforms.peer_group import PeerGroup
from ...weights.byte_weights import Keeps
from ...weights.model_file import DTYPES
from ...weights.shards import Shard
from ..device.step_shapes import StepShape
from ..drafter.cuda_drafters import Make
from ..entry.cuda_entry import SentStep
from ..exit.head_part import HeadPart
from ..model.block_bytes import KV_DTYPES, block_bytes_of
from ..model.kv_blocks import KvBlocks
from ..ranks.gpu_stage import GpuStageEnds
from ..ranks.rank_channels import agreed, open_channels
from ..ranks.rank_place import RankPlace, block_part, map_slots
from ..ranks.stage_relay import StageRelay
from ..step_executor import StepExecutor
from ..tiers.cuda_swapper import CudaSwapper
from ..tiers.locked_slots import LOCKABLE, RankSlots, check_room, touch
from .cuda import build_cuda_executor
from .cuda_drafting import LoadedHeads, LoadedModel
from .cuda_parts import CudaParts
from .rank import load_rank_weights, rank_model
from .rank_drafts import HEAD, draft_layout, load_draft_weights
from .single import engine_config_of, load_heads_weights


@dataclass(frozen=True, slots=True)
class LoadedRank(LoadedModel):
    """This rank's part of a model on its GPU; the config has the shapes of its layers."""

    request: BuildRequest
    place: RankPlace
    """With a group over peer memory, where there are several ranks in it."""
    group: PeerGroup | None
    host: Group
    """The same ranks over host memory."""
    stages: StageMemory | None
    """None: there is one stage."""
    relay: StageRelay | None = None
    """Where stages are on other hosts."""

    @property
    def has_head(self) -> bool:
        return self.place.stage.is_last

    def platform(self, config: EngineConfig) -> CudaPlatform:
        # The norm behind a tree is a launch of its own, with the bits of one GPU's.
        adds_products = model_class(self.config).adds_products(self.config)
        if self.group is not None and adds_products and not self.is_tree:
            return SummingPlatform.over(self.group, self.config, config)
        # Not by super(): slots make another class of this one.
        return LoadedModel.platform(self, config)

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        is_summing = isinstance(platform, SummingPlatform)
        ends = (
            None
            if self.stages is None
            else GpuStageEnds(self.stages, self.group if is_summing else None)
        )
        return rank_model(
            self.request,
            self.place,
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
        blocks: KvBlocks,
        *,
        swapper: CudaSwapper | None,
        make: Make | None,
        looks_at_all: bool,
    ) -> CudaParts:
        return CudaParts(
            decoder,
            platform,
            config,
            blocks,
            swapper=swapper,
            make=make,
            looks_at_all=looks_at_all,
            head_part=self.head_part(platform) if self.has_head else None,
            stages=self.stages,
            relay=self.relay,
            samples=self.has_head,
        )

    def swapper(self, blocks: KvBlocks, config: EngineConfig) -> CudaSwapper:
        """See `LoadedModel`. All ranks have the same slots, which the first one to map them
        makes."""
        block_bytes = block_bytes_of(self.request)
        place = self.place
        layout = self.request.options.layout
        check_room(config.num_swap_slots * block_bytes)
        slots = map_slots(place.slots, config, block_bytes)
        own = place.stage_index * layout.tensor + place.shard.index
        touch(torch.from_numpy(slots).view(torch.int32), own, layout.num_ranks)
        # Pages are locked sooner when they are there.
        self.agreed(0)
        return CudaSwapper(blocks, config.num_swap_slots, self._locked(slots))

    def _locked(self, slots: UInt8Array) -> RankSlots:
        """Raises `ConfigError` on all ranks where one of them cannot lock the slots, so that none
        waits for it."""
        try:
            locked = RankSlots(slots, block_part(self.request, self.place))
        except RuntimeError:
            locked = None
        if not self.agreed(int(locked is not None)) or locked is None:
            raise ConfigError("kv_swap_memory", slots.nbytes, LOCKABLE)
        return locked

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        return (
            None if self.group is None else _head_part(self, platform, self.place.shard, self.group)
        )

    def for_heads(self, decoder: Model, platform: CudaPlatform) -> Served:
        head = platform.linear(self.weights.linears[HEAD])
        return ServedPart(decoder.config, decoder.embedding, head)

    def agreed(self, number: int) -> int:
        return agreed(self.host, self.place.links, number)

    def begin(self) -> None:
        self.agreed(0)
        if self.relay is not None:
            self.relay.start()


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

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        return _head_part(self, platform, self.shard, self.group)


def _head_part(
    model: LoadedModel, platform: CudaPlatform, shard: Shard, group: PeerGroup
) -> HeadPart:
    part = model.weights.linears[HEAD]
    return HeadPart(part, platform.linear(part), shard, model.config.vocab_size, group)


def build_cuda_rank(
    request: BuildRequest, place: RankPlace, progress: Progress, keeps_bytes: Keeps
) -> tuple[StepExecutor[SentStep, StepShape], EngineConfig]:
    """Builds a rank's executor on this process's first GPU. `keeps_bytes`: weights of eight bits,
    or parts of such, that the GPU multiplies as they are. Raises `ConfigError`."""
    device = torch.device("cuda")
    options = request.options
    host = place.group
    config = engine_config_of(request, 0)
    dtype = DTYPES[request.dtype]
    in_planes = dtype in int4_gemm.DTYPES
    weights = load_rank_weights(
        request,
        place,
        device,
        progress,
        keeps_bytes=keeps_bytes,
        in_planes=in_planes,
        with_leaves=keep_leaves,
    )
    channels = open_channels(request, config, place)
    group = channels.group
    served = LoadedRank(
        place.local_config(request.model),
        order_linears(with_look_up(weights), rounds_tokens=request.rounds_tokens),
        KV_DTYPES[request.kv_format],
        request.is_tree,
        request,
        place if group is None else place.over(group),
        group,
        host,
        channels.stages,
        channels.relay,
    )
    # Nobody writes into memory that another rank has not mapped yet.
    served.agreed(0)
    return build_cuda_executor(
        served,
        config,
        device,
        draft=_draft_of(request, place.shard, group, progress),
        heads=_heads_of(request, place.shard),
        kv_cache_memory=options.kv_cache_memory // options.layout.num_ranks,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_sized=bool(options.num_blocks),
    )


def _draft_of(
    request: BuildRequest, shard: Shard, group: PeerGroup | None, progress: Progress
) -> LoadedModel | None:
    """Loads the draft model, if there is one. Raises `ConfigError`."""
    if (draft := request.draft) is None:
        return None
    in_planes = DTYPES[draft.dtype] in int4_gemm.DTYPES
    weights = load_draft_weights(draft, shard, torch.device("cuda"), progress, in_planes=in_planes)
    what = draft.model, with_look_up(weights), KV_DTYPES[draft.kv_format], False
    return LoadedModel(*what) if group is None else LoadedRankDraft(*what, draft, shard, group)


def _heads_of(request: BuildRequest, shard: Shard) -> LoadedHeads | None:
    """As `_draft_of`, of draft heads."""
    if request.heads is None:
        return None
    return LoadedHeads(
        request.heads, load_heads_weights(request, torch.device("cuda"), shard), shard
    )
