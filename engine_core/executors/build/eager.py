"""Parts of a step on a device that computes at once, put together: over a whole model, or a rank's
part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...config import EngineConfig
from ...executor import Swapper
from ...heads.heads_config import HeadsConfig
from ...heads.medusa import Medusa
from ...heads.registry import chain_heads
from ...layers.group import Alone
from ...layers.leaves import of_leaves
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...models.model import Model, model_class
from ...options import BuildRequest
from ...sampling.sampler import Sampler
from ...weights.shards import WHOLE, Shard
from ..device.eager import EagerDevice
from ..drafter.chained_heads import ChainedHeads
from ..drafter.draft_model import DraftModel
from ..drafter.eager_drafter import Drafts, EagerDrafter
from ..drafter.none import NoDrafter
from ..drafter.parallel_heads import ParallelHeads
from ..entry.eager_entry import EagerEntry, EagerStep, StepBatch
from ..exit.eager_sample import EagerSample
from ..exit.eager_send import EagerSend
from ..model.eager_caches import EagerCaches
from ..model.eager_layers import EagerLayers, Forward
from ..model.kv_blocks import KvBlocks
from ..ranks.stage_link import StageLinks
from ..step_executor import StepExecutor
from ..table.eager_table import EagerTable
from ..tiers.none import NoTiers

Loaded = tuple[Platform, Weights]
"""A model's operations and its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Models beside the served one that draft."""

    draft: Loaded | None = None
    """Operations and weights of the request's draft model."""
    heads: Loaded | None = None
    """Operations and weights of its draft heads."""
    shard: Shard = WHOLE
    """The part of their vocabulary that the weights of heads have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage's place among the others."""

    links: StageLinks = field(default_factory=StageLinks)
    is_last: bool = True


def eager_executor(
    request: BuildRequest,
    config: EngineConfig,
    platform: Platform,
    served: Model,
    drafting: Drafting,
    blocks: KvBlocks,
    *,
    swapper: Swapper | None,
    forward: Forward | None = None,
    sampler: Sampler | None = None,
    stage: Stage | None = None,
) -> StepExecutor[EagerStep, StepBatch]:
    """`blocks` have the layouts of `kv_layouts`, and `swapper` copies them. `forward` computes what
    the model's own forward pass computes, in another way; `sampler` is there where the model's
    logits are no whole rows; `stage` where there are several."""
    stage = stage or Stage()
    device = platform.device
    table = EagerTable(config)
    sampler = sampler or Sampler(config.num_rows, platform.sampling, device)
    kv_cache, *own_caches = blocks.kv_caches
    drafts = Drafts(table, sampler)
    drafter = _drafter(request, config, served, drafting, own_caches, table, drafts)
    return StepExecutor(
        device=EagerDevice(config, served.config.vocab_size),
        caches=EagerCaches(blocks),
        entry=EagerEntry(
            table,
            served,
            config,
            device,
            # The next stage goes on with all tokens.
            looks_at_all=drafter.looks_at_all or not stage.is_last,
            most_drafts=drafter.most,
            inputs=drafter.layers,
        ),
        layers=EagerLayers(forward or served.forward, kv_cache),
        exit=_exit(served, table, sampler, device, stage),
        drafter=drafter,
        # Copies are made between steps, where they are asked for.
        tiers=NoTiers(),
        swapper=swapper,
    )


def whole_model(request: BuildRequest, config: EngineConfig, loaded: Loaded) -> Model:
    """The request's model over all of its weights."""
    platform, weights = loaded
    found = model_class(request.model)
    if request.is_tree:
        weights = of_leaves(weights, found.layout(request.model), platform, Alone())
    return found(request.model, weights, platform, config.max_model_len)


def _exit(
    served: Model, table: EagerTable, sampler: Sampler, device: torch.device, stage: Stage
) -> EagerSample | EagerSend:
    links = stage.links
    if stage.is_last:
        return EagerSample(served, table, sampler, device, links.tokens_out)
    assert links.stream_out is not None
    assert links.tokens_in is not None
    return EagerSend(table, links.stream_out, links.tokens_in)


def _drafter(
    request: BuildRequest,
    config: EngineConfig,
    served: Model,
    drafting: Drafting,
    kv_caches: Sequence[torch.Tensor],
    table: EagerTable,
    drafts: Drafts,
) -> EagerDrafter:
    """`kv_caches`: those of what drafts, at most one."""
    if request.draft is not None:
        assert drafting.draft is not None
        model = whole_model(request.draft, config, drafting.draft)
        return DraftModel(model, config, kv_caches[0], table, drafts)
    if request.heads is not None:
        assert drafting.heads is not None
        return _head_drafter(request.heads, config, served, drafting, kv_caches, table, drafts)
    return NoDrafter()


def _head_drafter(
    heads: HeadsConfig,
    config: EngineConfig,
    served: Model,
    drafting: Drafting,
    kv_caches: Sequence[torch.Tensor],
    table: EagerTable,
    drafts: Drafts,
) -> EagerDrafter:
    assert drafting.heads is not None
    platform, weights = drafting.heads
    if heads.layer is None:
        medusa = Medusa(heads, weights, platform, served, config.max_model_len)
        return ParallelHeads(medusa, config, served.embedding.dtype, platform.device, drafts)
    chained = chain_heads(heads, weights, platform, served, config.max_model_len, drafting.shard)
    return ChainedHeads(chained, config, kv_caches[0], table, drafts)
