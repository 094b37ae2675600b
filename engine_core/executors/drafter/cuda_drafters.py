"""Builds an executor's drafter on a GPU: a smaller model, or heads of one of the published
kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...config import EngineConfig
from ...heads.medusa import Medusa
from ...heads.registry import ChainHeads
from ...models.model import Model
from ...platforms.cuda import CudaPlatform
from ..device.cuda_device import CudaDevice
from ..device.step_shapes import StepShapes
from ..entry.step_buffers import StepBuffers
from ..exit.device_head import DeviceHead
from ..exit.device_sampler import DeviceSampler
from ..model.device_model import DeviceModel
from ..table.device_table import DeviceTable
from .cuda_draft_model import CudaDraftModel, drafting_config
from .cuda_drafter import CudaDrafter, DraftingSteps
from .cuda_heads import CudaChainHeads, CudaParallelHeads, PairedModel, Pairs


@dataclass(frozen=True, slots=True)
class Drafted:
    """Parts of an executor that a drafter uses."""

    device: CudaDevice
    served: DeviceModel
    sampler: DeviceSampler
    table: DeviceTable

    def steps(
        self, config: EngineConfig, platform: CudaPlatform, sampler: DeviceSampler
    ) -> DraftingSteps:
        """Makes the steps of what drafts, within the limits of the config."""
        shapes = StepShapes(config, platform.plans)
        num_parts = self.device.num_parts
        return DraftingSteps(config, shapes, sampler, self.table, self.served.buffers, num_parts)


class NewDrafter(Protocol):
    """Makes a drafter for the parts of an executor."""

    looks_at_all: bool
    """Whether it is shown the hidden states of all tokens."""
    writes_drafts: bool
    """Whether it writes drafts into the request table, where they are looked up otherwise."""

    def drafter(
        self, drafted: Drafted, config: EngineConfig, kv_caches: Sequence[torch.Tensor]
    ) -> CudaDrafter:
        """`kv_caches`: KV caches of the drafter, at most one."""


def model_drafter(
    drafted: Drafted,
    decoder: Model,
    head: DeviceHead,
    platform: CudaPlatform,
    config: EngineConfig,
    kv_cache: torch.Tensor,
) -> CudaDraftModel:
    """A model that drafts; `head`: the model's."""
    table = drafted.table
    limits = drafting_config(config)
    sampler = drafted.sampler.beside(head, decoder.dtype)
    steps = drafted.steps(limits, platform, sampler)
    graphs = drafted.device.new_graphs()
    model = DeviceModel(
        decoder, platform, limits, kv_cache, table, steps.buffers, steps.shapes, graphs
    )
    return CudaDraftModel(model, steps, sampler, config, table, decoder.config.hidden_size)


def chain_drafter(
    drafted: Drafted,
    heads: ChainHeads,
    served: Model,
    platform: CudaPlatform,
    config: EngineConfig,
    kv_cache: torch.Tensor,
) -> CudaChainHeads:
    """Heads that draft one token after another."""
    table = drafted.table
    model = drafted.served
    sampler = drafted.sampler.beside(drafted.sampler.head, served.dtype)
    steps = drafted.steps(config, platform, sampler)

    def pairs(num_tokens: int, buffers: StepBuffers, shapes: StepShapes) -> Pairs:
        size = num_tokens, heads.config.hidden_size
        features = torch.zeros(size, dtype=served.dtype, device=platform.device)
        graphs = drafted.device.new_graphs()
        given = platform, config, kv_cache, table, buffers, shapes, graphs
        return Pairs(DeviceModel(PairedModel(heads, features), *given, is_paired=True), features)

    read = pairs(max(model.shapes.most_tokens, config.max_positions), model.buffers, model.shapes)
    drafting = pairs(config.max_positions, steps.buffers, steps.shapes)
    return CudaChainHeads(heads, read, drafting, steps, sampler, config, table)


def parallel_drafter(
    drafted: Drafted, heads: Medusa, served: Model, platform: CudaPlatform, config: EngineConfig
) -> CudaParallelHeads:
    """Heads each of which drafts one position."""
    sampler = drafted.sampler.beside(drafted.sampler.head, served.dtype)
    steps = drafted.steps(config, platform, sampler)
    return CudaParallelHeads(heads, drafted.served, steps, sampler, config, drafted.table)
