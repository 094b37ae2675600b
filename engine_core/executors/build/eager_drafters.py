"""The part of a step that drafts, on a device that computes at once."""

from __future__ import annotations

from dataclasses import dataclass

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
from ..model.block_bytes import KV_DTYPES
from ..model.new_cache import NewCache
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
    """The part of their vocabulary that heads have."""
    new_cache: NewCache


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
    loaded = loader.draft(request)
    return DraftModel(
        whole_model(request, config, loaded),
        config,
        KV_DTYPES[request.kv_format],
        loaded[0].device,
        drafted.table,
        drafted.drafts,
        drafted.new_cache,
    )


def _heads(
    request: BuildRequest,
    heads: HeadsConfig,
    config: EngineConfig,
    loader: Loader,
    drafted: Drafted,
) -> EagerDrafter:
    served = drafted.served
    platform, weights = loader.heads(request)
    dtype = served.embedding.dtype
    device = platform.device
    if heads.layer is None:
        medusa = Medusa(heads, weights, platform, served, config.max_model_len)
        return ParallelHeads(medusa, config, dtype, device, drafted.drafts)
    chained = chain_heads(heads, weights, platform, served, config.max_model_len, drafted.shard)
    return ChainedHeads(
        chained, config, dtype, device, drafted.table, drafted.drafts, drafted.new_cache
    )
