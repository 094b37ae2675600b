"""One rank's place in an engine, and its part of a model: any platform's ranks are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..config import EngineConfig
from ..executor import Executor
from ..layers import kinds
from ..layers.group import Group
from ..layers.kinds import Weights
from ..layers.platform import Platform
from ..layers.sharded import ShardedEmbedding, over_group
from ..model_config import ModelConfig
from ..models.model import Model, model_class
from ..options import BuildRequest, ExecutorOptions, Progress
from ..shards import Shard, local_config
from ..weights.model_file import DTYPES
from .build_single import KV_DTYPES, stored_tensors
from .runner import Runner
from .single import SingleExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    shard: Shard
    group: Group
    """The ranks that divide this rank's layers."""

    @property
    def part(self) -> str:
        """Names this rank's part of a model's weights."""
        return f"shard {self.shard.index} of {self.shard.size}"

    def local_config(self, model: ModelConfig) -> ModelConfig:
        """The shapes of this rank's layers."""
        return local_config(model, self.shard)


class ParallelDevice(Protocol):
    """What a device with the flag `parallel` offers."""

    def build_rank(self, request: BuildRequest, place: RankPlace, progress: Progress) -> tuple[Executor, EngineConfig]:
        """The executor of one rank. All ranks find the same config. Raises `ConfigError`."""

    def max_ranks(self, options: ExecutorOptions) -> int:
        """Ranks that one engine may have on this machine."""


def load_rank_weights(
    request: BuildRequest, place: RankPlace, device: torch.device, progress: Progress, *, keeps_packed: bool = False
) -> Weights:
    """As `build_single.load_weights`, of this rank alone. Of a folder's tensors on a CPU, which are mapped, nothing
    else is read. Raises `ConfigError`."""
    layout = model_class(request.model).layout(request.model)
    tensors = stored_tensors(request, device, partial(progress, "loading weights"), keeps_packed=keeps_packed)
    return kinds.load_weights(layout, tensors, DTYPES[request.dtype], place.shard)


def rank_executor(
    request: BuildRequest, place: RankPlace, config: EngineConfig, platform: Platform, weights: Weights
) -> Executor:
    """As `single_executor`, over this rank's weights."""
    model = _model(request, place, config, platform, weights)
    return SingleExecutor(Runner(model, config, KV_DTYPES[request.kv_format], platform))


def _model(
    request: BuildRequest, place: RankPlace, config: EngineConfig, platform: Platform, weights: Weights
) -> Model:
    layout = model_class(request.model).layout(request.model)
    whole = over_group(weights, layout, platform, place.shard, place.group)
    model = model_class(request.model)(place.local_config(request.model), whole, platform, config.max_model_len)
    token_ids = place.shard.vocabulary(request.model.vocab_size)
    model.embedding = ShardedEmbedding(model.embedding, token_ids, place.group)
    return model
