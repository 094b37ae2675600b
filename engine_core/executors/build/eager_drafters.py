"""Builds the drafter of a step on a platform whose operations are complete when they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...config import EngineConfig
from ...heads.heads_config import HeadsConfig
from ...heads.medusa import Medusa
from ...heads.registry import chain_heads
from ...models.model import Model
from ...options import BuildRequest
from ...weights.shards import Shard
from ..drafter.chained_heads import ChainedHeads
from ..drafter.draft_model import DraftModel
from ..drafter.eager_drafter import Drafts, EagerDrafter
from ..drafter.none import NoDrafter
from ..drafter.parallel_heads import ParallelHeads
from ..table.eager_table import EagerTable
from .loader import Loader
from .models import whole_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Parts that drafters share with the steps of the served model."""

    served: Model
    table: EagerTable
    drafts: Drafts
    shard: Shard
    """The rank's shard of the heads' vocabulary."""
    kv_caches: Sequence[torch.Tensor]
    """KV caches of the drafter, at most one."""


def new_drafter(
    request: BuildRequest, config: EngineConfig, loader: Loader, drafted: Drafted
) -> EagerDrafter:
    """Drafts as the request says. Raises `ConfigError`."""
    if request.draft is not None:
        return _draft_model(request.draft, config, loader, drafted)
    if request.heads is not None:
        return _heads(request, request.heads, config, loader, drafted)
    return NoDrafter()


def _draft_model(
    request: BuildRequest, config: EngineConfig, loader: Loader, drafted: Drafted
) -> DraftModel:
    model = whole_model(request, config, loader.draft(request))
    return DraftModel(model, config, drafted.kv_caches[0], drafted.table, drafted.drafts)


def _heads(
    request: BuildRequest,
    heads: HeadsConfig,
    config: EngineConfig,
    loader: Loader,
    drafted: Drafted,
) -> EagerDrafter:
    served = drafted.served
    platform, weights = loader.heads(request)
    if heads.layer is None:
        medusa = Medusa(heads, weights, platform, served, config.max_model_len)
        return ParallelHeads(
            medusa, config, served.embedding.dtype, platform.device, drafted.drafts
        )
    chained = chain_heads(heads, weights, platform, served, config.max_model_len, drafted.shard)
    return ChainedHeads(chained, config, drafted.kv_caches[0], drafted.table, drafted.drafts)
