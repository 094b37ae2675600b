"""The executor of one rank of an engine that several GPUs compute together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headwater.kernels import int4_gemm
from headwater.kernels.stage_memory import StageMemory

from ..config import ConfigError, EngineConfig
from ..executor import UInt8Array
from ..heads.served import Served, ServedPart
from ..layers.group import Group
from ..layers.leaf_matrix import keep_leaves
from ..layers.ordered import order_linears
from ..layers.sharded import over_group
from ..models.model import Model, model_class
from ..options import OFF, BuildRequest, ExecutorOptions, Progress
from ..platforms.cuda import CudaPlatform
from ..platforms.cuda_packed import with_look_up
from ..platforms.cuda_rank import SummingPlatform
from ..platforms.peer_group import PeerGroup, open_peer_group
from ..shards import ParallelLayout, Shard
from ..weights.byte_weights import Keeps
from ..weights.model_file import DTYPES
from .build_cuda import build_cuda_executor
from .build_single import KV_DTYPES, block_bytes_of, engine_config_of, load_heads_weights
from .cuda import CudaExecutor
from .cuda_drafting import LoadedHeads, LoadedModel
from .cuda_stage import CudaStageExecutor
from .cuda_swapper import CudaSwapper
from .gpu_stage import GpuStageEnds, open_stage_memory, recorded, sizes_of
from .head_part import HeadPart
from .host_exchange import ExchangeSizes, HostExchange, first_unreached, open_exchange
from .locked_slots import LOCKABLE, RankSlots, check_room, touch
from .rank_drafts import HEAD, draft_layout, load_draft_weights
from .rank_place import RankPlace, block_part, load_rank_weights, map_slots, rank_model
from .stage_link import StageLinks
from .stage_relay import StageRelay


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
        if self.group is not None and model_class(self.config).adds_products and not self.is_tree:
            return SummingPlatform.over(self.group, self.config, config)
        # Not by super(): slots make another class of this one.
        return LoadedModel.platform(self, config)

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        is_summing = isinstance(platform, SummingPlatform)
        ends = None if self.stages is None else GpuStageEnds(self.stages, self.group if is_summing else None)
        return rank_model(
            self.request, self.place, max_model_len, platform, self.weights, sums_products=not is_summing, ends=ends
        )

    def executor(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        kv_caches: Sequence[torch.Tensor],
        *,
        swapper: CudaSwapper | None,
        looks_at_all: bool,
    ) -> CudaExecutor | CudaStageExecutor:
        if self.stages is not None and not self.has_head:
            return CudaStageExecutor(decoder, platform, config, kv_caches, self.stages, swapper=swapper)
        return CudaExecutor(
            decoder,
            platform,
            config,
            kv_caches,
            swapper=swapper,
            looks_at_all=looks_at_all,
            head_part=self.head_part(platform),
            stages=self.stages,
        )

    def swapper(self, kv_caches: Sequence[torch.Tensor], config: EngineConfig) -> CudaSwapper:
        """See `LoadedModel`. All ranks have the same slots, which the first one to map them makes."""
        block_bytes, place, layout = block_bytes_of(self.request), self.place, self.request.options.layout
        check_room(config.num_swap_slots * block_bytes)
        slots, own = map_slots(place.slots, config, block_bytes), place.stage_index * layout.tensor + place.shard.index
        touch(torch.from_numpy(slots).view(torch.int32), own, layout.num_ranks)
        # Pages are locked sooner when they are there.
        self.agreed(0)
        return CudaSwapper(kv_caches, config.num_swap_slots, self._locked(slots))

    def _locked(self, slots: UInt8Array) -> RankSlots:
        """Raises `ConfigError` on all ranks where one of them cannot lock the slots, so that none waits for it."""
        try:
            locked = RankSlots(slots, block_part(self.request, self.place))
        except RuntimeError:
            locked = None
        if not self.agreed(int(locked is not None)) or locked is None:
            raise ConfigError("kv_swap_memory", slots.nbytes, LOCKABLE)
        return locked

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        return None if self.group is None else _head_part(self, platform, self.place.shard, self.group)

    def for_heads(self, decoder: Model, platform: CudaPlatform) -> Served:
        return ServedPart(decoder.config, decoder.embedding, platform.linear(self.weights.linears[HEAD]))

    def agreed(self, number: int) -> int:
        return _agreed(self.host, self.place.links, number)

    def begin(self, executor: CudaExecutor | CudaStageExecutor) -> None:
        self.agreed(0)
        if self.relay is not None:
            executor.relay_by(self.relay)
            self.relay.start()


@dataclass(frozen=True, slots=True)
class LoadedRankDraft(LoadedModel):
    """A draft model of which this rank has all layers, and a part of the vocabulary head."""

    request: BuildRequest
    shard: Shard
    group: PeerGroup

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        whole = over_group(self.weights, draft_layout(self.request), platform, self.shard, self.group)
        return model_class(self.config)(self.config, whole, platform, max_model_len)

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        return _head_part(self, platform, self.shard, self.group)


def _head_part(model: LoadedModel, platform: CudaPlatform, shard: Shard, group: PeerGroup) -> HeadPart:
    part = model.weights.linears[HEAD]
    return HeadPart(part, platform.linear(part), shard, model.config.vocab_size, group)


def build_cuda_rank(
    request: BuildRequest, place: RankPlace, progress: Progress, keeps_bytes: Keeps
) -> tuple[CudaExecutor | CudaStageExecutor, EngineConfig]:
    """Builds a rank's executor on this process's first GPU. `keeps_bytes`: weights of eight bits, or parts of such,
    that the GPU multiplies as they are. Raises `ConfigError`."""
    device, options, host = torch.device("cuda"), request.options, place.group
    config, dtype = engine_config_of(request, 0), DTYPES[request.dtype]
    in_planes = dtype in int4_gemm.DTYPES
    weights = load_rank_weights(
        request, place, device, progress, keeps_bytes=keeps_bytes, in_planes=in_planes, with_leaves=keep_leaves
    )
    group, stages, relay = _opened(request, config, place)
    served = LoadedRank(
        place.local_config(request.model),
        order_linears(with_look_up(weights), rounds_tokens=request.rounds_tokens),
        KV_DTYPES[request.kv_format],
        request.is_tree,
        request,
        place if group is None else place.over(group),
        group,
        host,
        stages,
        relay,
    )
    # Nobody writes into memory that another rank has not mapped yet.
    served.agreed(0)
    return build_cuda_executor(
        served,
        config,
        device,
        draft=_draft_of(request, place.shard, group, progress) if place.stage.is_first else None,
        heads=_heads_of(request, place.shard),
        stages=stages if request.stage_drafts is not None and not place.stage.is_first else None,
        kv_cache_memory=options.kv_cache_memory // options.layout.num_ranks,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_sized=bool(options.num_blocks),
    )


def _draft_of(request: BuildRequest, shard: Shard, group: PeerGroup | None, progress: Progress) -> LoadedModel | None:
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
    return LoadedHeads(request.heads, load_heads_weights(request, torch.device("cuda"), shard), shard)


def _opened(
    request: BuildRequest, config: EngineConfig, place: RankPlace
) -> tuple[PeerGroup | None, StageMemory | None, StageRelay | None]:
    """How this rank exchanges with those that divide its layers, and with other stages, on this host and on others,
    where there are such."""
    hidden_size, dtype, options = request.model.hidden_size, DTYPES[request.dtype], request.options
    row_bytes, layout = hidden_size * dtype.itemsize, options.layout
    stage_sizes = sizes_of(config, hidden_size, dtype) if layout.pipeline > 1 else None
    sizes = ExchangeSizes(
        layout=layout, row_bytes=row_bytes, stages=stage_sizes, here=options.stages_beside(place.stage_index)
    )
    group, stages, relay = None, None, None
    exchange = _host_exchange(request, place, sizes)
    if layout.tensor > 1 and exchange is not None and exchange.has_peers:
        group = PeerGroup(exchange.peers())
    elif layout.tensor > 1:
        group = open_peer_group(place.group, row_bytes)
    if stage_sizes is not None:
        of_all = place.links.of_all_stages
        stages = open_stage_memory(place.stage_index, stage_sizes, of_all) if exchange is None else exchange.stages()
    if options.stage_hosts:
        assert exchange is not None
        relay = exchange.relay(place.links, recorded)
    return group, stages, relay


def _host_exchange(request: BuildRequest, place: RankPlace, sizes: ExchangeSizes) -> HostExchange | None:
    """Host memory through which ranks exchange; None: their GPUs reach one another's memory. Raises `ConfigError` on
    all ranks where one of them cannot lock it, so that none waits for it."""
    options, own = request.options, _rank_of(place, sizes.layout)
    why = "peer_access is off" if options.peer_access == OFF else _unreached(place, options, own)
    if not why and not options.stage_hosts:
        return None
    # Stages of this host and of others exchange in one way.
    sizes = replace(sizes, has_peers=bool(why))
    exchange = open_exchange(place.exchange, sizes, own)
    if not _agreed(place.group, place.links, int(exchange is not None)) or exchange is None:
        raise _unlocked(options, sizes, why)
    if why:
        place.warn(f"{why}: ranks exchange tensors through host memory, which is slower than between GPUs")
    return exchange


def _unlocked(options: ExecutorOptions, sizes: ExchangeSizes, why: str) -> ConfigError:
    missing = f"the host does not let a GPU lock {sizes.num_bytes} bytes to exchange through"
    if options.stage_hosts:
        return ConfigError("stage_hosts", options.stage_hosts, f"0, since {missing}")
    allowed = f"auto, where GPUs reach one another's memory; {why}, and {missing}"
    return ConfigError("peer_access", options.peer_access, allowed)


def _unreached(place: RankPlace, options: ExecutorOptions, own: int) -> str:
    """Names the first two ranks whose GPUs do not reach one another's memory, the same on all ranks; empty: all that
    exchange through it do."""
    other, num_ranks = first_unreached(options, own), options.layout.num_ranks
    none = num_ranks * num_ranks
    pair = _agreed(place.group, place.links, none if other is None else own * num_ranks + other)
    if pair == none:
        return ""
    one, another = divmod(pair, num_ranks)
    return f"the GPUs of ranks {one} and {another} do not reach one another's memory with atomic operations"


def _rank_of(place: RankPlace, layout: ParallelLayout) -> int:
    return place.stage_index * layout.tensor + place.shard.index


def _agreed(host: Group, links: StageLinks, number: int) -> int:
    """The least of what all ranks give."""
    of_stage = int(host.join(torch.tensor([[number]])).min())
    of_all = links.of_all_stages(of_stage.to_bytes(8, "little"))
    return min(int.from_bytes(each, "little") for each in of_all)
