"""The executor of one rank of an engine that several GPUs compute together."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..layers.group import Group
from ..models.model import Model, model_class
from ..options import BuildRequest, ExecutorOptions, Progress
from ..platforms.cuda import CudaPlatform
from ..platforms.cuda_rank import SummingPlatform
from ..platforms.peer_group import PeerGroup, open_peer_group
from ..weights.model_file import DTYPES
from .build_cuda import build_cuda_executor
from .build_single import KV_DTYPES, engine_config_of
from .cuda import CudaExecutor
from .cuda_drafting import LoadedModel
from .head_part import HeadPart
from .rank_devices import shares_a_gpu
from .rank_place import RankPlace, load_rank_weights, rank_model


@dataclass(frozen=True, slots=True)
class LoadedRank(LoadedModel):
    """This rank's part of a model on its GPU; the config has the shapes of its layers."""

    request: BuildRequest
    place: RankPlace
    """With a group over peer memory."""
    group: PeerGroup
    host: Group
    """The same ranks over host memory."""

    def platform(self, config: EngineConfig) -> CudaPlatform:
        if model_class(self.config).adds_products:
            return SummingPlatform.over(self.group, self.config, config)
        return CudaPlatform.of(self.config, config)

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        sums = not isinstance(platform, SummingPlatform)
        return rank_model(self.request, self.place, max_model_len, platform, self.weights, sums_products=sums)

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        part = self.weights.linears["lm_head"]
        first = self.place.shard.vocabulary(self.config.vocab_size).start
        return HeadPart(part, platform.linear(part), first, self.group)

    def agreed(self, number: int) -> int:
        return int(self.host.join(torch.tensor([[number]])).min())


def build_cuda_rank(request: BuildRequest, place: RankPlace, progress: Progress) -> tuple[CudaExecutor, EngineConfig]:
    """On the GPU that is this process's first. Raises `ConfigError`."""
    device, options, host = torch.device("cuda"), request.options, place.group
    weights = load_rank_weights(request, place, device, progress)
    row_bytes = request.model.hidden_size * DTYPES[request.dtype].itemsize
    group = open_peer_group(host, row_bytes, _devices(options, place))
    served = LoadedRank(
        place.local_config(request.model),
        weights,
        KV_DTYPES[request.kv_format],
        request,
        place.over(group),
        group,
        host,
    )
    return build_cuda_executor(
        served,
        engine_config_of(request, 0),
        device,
        draft=None,
        heads=None,
        kv_cache_memory=options.kv_cache_memory // place.shard.size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_sized=bool(options.num_blocks),
    )


def _devices(options: ExecutorOptions, place: RankPlace) -> list[int]:
    """The GPU of each rank, as this process numbers them: its own first, then those of the others in their order."""
    own, size = place.shard.index, options.layout.num_ranks
    if shares_a_gpu(os.environ):
        return [0] * size
    return [0 if rank == own else rank + (rank < own) for rank in range(size)]
