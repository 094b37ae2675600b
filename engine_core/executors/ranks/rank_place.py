"""One rank's place in an engine: its layers, its blocks, and the contract of devices with ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...config import EngineConfig
from ...executor import Executor, UInt8Array
from ...layers.group import Group
from ...layers.staged import is_of_first_stage, layer_of
from ...models.model import model_class
from ...options import BuildRequest, ExecutorOptions, Progress
from ...system.ring import map_at_least
from ...weights.model_config import ModelConfig
from ...weights.shards import Shard, Stage, local_config, stages
from ..tiers.block_part import BlockPart
from .stage_link import StageLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    shard: Shard
    stage_index: int
    stage: Stage
    group: Group
    """The ranks that divide this rank's layers."""
    links: StageLinks
    slots: int
    """A descriptor of the memory in which all ranks keep blocks, each its part of them."""
    exchange: int
    """A descriptor of the memory through which ranks exchange tensors where their GPUs do not reach
    one another's."""
    warn: Callable[[str], None]
    """Says once for all ranks what the engine's log has to say."""

    @property
    def part(self) -> str:
        """Names this rank's part of a model's weights."""
        return (
            f"shard {self.shard.index} of {self.shard.size}, layers {self.stage.first} to "
            f"{self.stage.stop}"
        )

    def over(self, group: Group) -> RankPlace:
        """The place with the same ranks over another memory."""
        return replace(self, group=group)

    def local_config(self, model: ModelConfig) -> ModelConfig:
        """The shapes of this rank's layers."""
        return local_config(model.of_layers(self.stage.first, self.stage.stop), self.shard)


class ParallelDevice(Protocol):
    """A device with the flag `parallel`."""

    def build_rank(
        self, request: BuildRequest, place: RankPlace, progress: Progress
    ) -> tuple[Executor, EngineConfig]:
        """The executor of one rank. All ranks find the same config. Raises `ConfigError`."""

    def max_ranks(self, options: ExecutorOptions) -> int:
        """Ranks that one engine may have on this machine."""

    def rank_variables(self, options: ExecutorOptions, rank: int) -> dict[str, str]:
        """Variables of the environment of a rank's process, beside those of the engine's."""


def stages_of(request: BuildRequest) -> list[Stage]:
    """The layers of each pipeline stage, divided by the numbers in their weights."""
    layout = model_class(request.model).layout(request.model)
    num_layers = request.model.num_layers
    sizes = {name: math.prod(spec.shape) for name, spec in layout.items()}
    of_layers = [0] * num_layers
    of_ends = {True: 0, False: 0}
    for name, spec in layout.items():
        if (layer := layer_of(name)) is not None:
            of_layers[layer] += sizes[name]
        else:
            of_ends[is_of_first_stage(spec)] += sizes[name]
    return stages(of_layers, of_ends[True], of_ends[False], request.options.pipeline_parallel_size)


def block_part(request: BuildRequest, place: RankPlace) -> BlockPart:
    """This rank's part of a block in a slot, which is as one process has it: its bytes do not
    depend on the layout."""
    return BlockPart(
        num_planes=2 * place.stage.total,
        planes=range(2 * place.stage.first, 2 * place.stage.stop),
        num_heads=request.model.num_kv_heads,
        heads=place.shard.part(request.model.num_kv_heads),
    )


def map_slots(memory: int, config: EngineConfig, block_bytes: int) -> UInt8Array:
    """Maps the slots, [slots, bytes of a block], in memory that all ranks share. The first one to
    map it sets its size."""
    shape = config.num_swap_slots, block_bytes
    return np.frombuffer(map_at_least(memory, math.prod(shape)), np.uint8).reshape(shape)
