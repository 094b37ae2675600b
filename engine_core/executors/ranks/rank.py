"""One rank of an engine: its layers, its blocks, and the ranks that it exchanges tensors with."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...config import EngineConfig
from ...executor import UInt8Array
from ...layers.process_group import Alone, Group
from ...layers.staged import is_of_first_stage, layer_of
from ...models.model import model_class
from ...options import BuildRequest
from ...system.ring import map_at_least
from ...weights.model_config import ModelConfig
from ...weights.shards import (
    WHOLE,
    ParallelLayout,
    Shard,
    Stage,
    kv_heads,
    local_config,
    stages,
)
from ..tiers.block_slice import BlockSlice
from .stage_link import StageLinks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of an engine, as its process knows it."""

    shard: Shard
    stage_index: int
    stage: Stage
    group: Group
    """The ranks that divide this rank's layers."""
    links: StageLinks
    slots: int
    """Descriptor of the memory for copies of blocks that all ranks share; a rank writes its part of
    each block."""
    exchange: int
    """A descriptor of the memory through which ranks exchange tensors where their GPUs do not reach
    one another's."""
    adapters: int
    """Descriptor of the memory from which each rank copies its part of adapters."""
    warn: Callable[[str], None]
    """Writes a line to the engine's log, once for all ranks."""

    @property
    def is_whole(self) -> bool:
        """Whether it computes all of the model."""
        return self.shard.size == 1 and self.stage.is_first and self.stage.is_last

    def named(self, name: str) -> str:
        """A name of what each rank of an engine has of its own."""
        return name if self.is_whole else f"{name}-{self.stage_index}-{self.shard.index}"

    @property
    def part(self) -> str:
        """Names this rank's part of a model's weights; empty: all of them."""
        if self.is_whole:
            return ""
        return (
            f"shard {self.shard.index} of {self.shard.size}, layers {self.stage.first} to "
            f"{self.stage.stop}"
        )

    def number(self, layout: ParallelLayout) -> int:
        """Number of the rank among all ranks of the engine."""
        return self.stage_index * layout.tensor + self.shard.index

    def over(self, group: Group) -> Rank:
        """The same rank with another transport for tensors."""
        return replace(self, group=group)

    def local_config(self, model: ModelConfig) -> ModelConfig:
        """The shapes of this rank's layers."""
        return local_config(model.of_layers(self.stage.first, self.stage.stop), self.shard)


def whole_rank(model: ModelConfig) -> Rank:
    """The only rank of an engine in one process: no other rank is there to exchange anything
    with."""
    return Rank(
        shard=WHOLE,
        stage_index=0,
        stage=Stage(0, model.num_layers, model.num_layers),
        group=Alone(),
        links=StageLinks(),
        slots=-1,
        exchange=-1,
        adapters=-1,
        warn=log.warning,
    )


def stages_of(request: BuildRequest) -> list[Stage]:
    """The layers of each pipeline stage, divided by the numbers in their weights."""
    found = model_class(request.model)
    layout = found.layout(request.model)
    num_layers = request.model.num_layers
    sizes = {name: math.prod(spec.shape) for name, spec in layout.items()}
    of_layers = [0] * num_layers
    of_ends = {True: 0, False: 0}
    for name, spec in layout.items():
        if (layer := layer_of(name)) is not None:
            of_layers[layer] += sizes[name]
        else:
            of_ends[is_of_first_stage(spec)] += sizes[name]
    # Layers that read one another's caches stay on one stage.
    step = getattr(found, "stage_step", 1)
    firsts = range(0, num_layers, step)
    sizes_together = [sum(of_layers[i : i + step]) for i in firsts]
    count = request.options.pipeline_parallel_size
    states = request.model.states
    has_cache = [] if states is None else [not all(states.is_state[i : i + step]) for i in firsts]
    divided = stages(sizes_together, of_ends[True], of_ends[False], count, has_cache)
    return [Stage(step * each.first, step * each.stop, num_layers) for each in divided]


def block_slice(request: BuildRequest, rank: Rank) -> BlockSlice:
    """This rank's part of a block in a slot. A slot holds a block as a single process would: its
    bytes do not depend on the number of ranks. Ranks that divide heads write the same latents to
    the same place."""
    planes = request.model.kv_planes
    return BlockSlice(
        num_planes=planes * rank.stage.total,
        planes=range(planes * rank.stage.first, planes * rank.stage.stop),
        num_heads=request.model.num_kv_heads,
        heads=kv_heads(request.model, rank.shard),
    )


def map_slots(memory: int, config: EngineConfig, block_bytes: int) -> UInt8Array:
    """Maps the slots, [slots, bytes of a block], in memory that all ranks share. The first rank to
    map it sets its size."""
    shape = config.num_swap_slots, block_bytes
    return np.frombuffer(map_at_least(memory, math.prod(shape)), np.uint8).reshape(shape)
