"""Models and draft heads on a GPU, before there is an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from ...config import EngineConfig
from ...heads.heads_config import HeadsConfig
from ...heads.served import Served
from ...layers.adapters.row_adapters import RowAdapters, with_adapters
from ...layers.linear.kinds import Weights
from ...models.model import Model, model_class
from ...options import BuildRequest, Progress
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_tree import TreePlatform
from ...platforms.stored_weights import StoredWeights
from ...weights.model_config import ModelConfig
from ...weights.page_plan import PagePlan
from ...weights.shards import WHOLE, Shard
from ..device.placed_weights import EngineWeights
from ..drafter.cuda_drafters import NewDrafter
from ..exit.device_head import DeviceHead, WholeHead
from ..model.adapter_memory import AdapterMemory, adapter_memory
from ..model.block_bytes import KV_DTYPES
from ..model.kv_blocks import KvBlocks, KvLayout
from ..ranks.rank_adapters import RankAdapters
from ..tiers.cuda_swapper import CudaSwapper
from .cuda_parts import CudaParts
from .hooks import Hooks
from .weights import load_heads_weights, load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its weights on the GPU."""

    config: ModelConfig
    weights: Weights
    kv_dtype: torch.dtype
    is_tree: bool
    """Whether the model computes with `numerics` tree."""

    def platform(self, config: EngineConfig) -> CudaPlatform:
        return (TreePlatform if self.is_tree else CudaPlatform).of(self.config, config)

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        return model_class(self.config)(self.config, self.weights, platform, max_model_len)

    def with_adapters(
        self, platform: CudaPlatform, num_bytes: int
    ) -> tuple[Self, AdapterMemory | RankAdapters | None]:
        """The model with adapters behind its layers, and their memory of so many bytes; 0: the
        model has none. Raises `ConfigError`."""
        if not num_bytes:
            return self, None
        found = model_class(self.config)
        dtype = self.weights.table("embed").dtype
        model_layout = found.layout(self.config)
        memory, slab, layout = adapter_memory(
            num_bytes, model_layout, found.names, dtype, platform.device
        )
        weights = with_adapters(self.weights, layout, RowAdapters(platform, slab))
        return replace(self, weights=weights), memory

    def kv_layout(self, pages: PagePlan | None = None) -> KvLayout:
        """`pages`: page groups; None: one."""
        return KvLayout.of(self.config, self.kv_dtype, pages)

    @property
    def has_head(self) -> bool:
        """Whether this stage has the vocabulary head, or a part of it."""
        return True

    def parts(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        pages: PagePlan,
        blocks: KvBlocks,
        drafting: NewDrafter,
        swapper: CudaSwapper | None,
    ) -> CudaParts:
        """Parts of the executor that computes plans with the model; see `CudaParts`."""
        return CudaParts(
            decoder,
            platform,
            config,
            pages,
            blocks,
            self.head(decoder, platform),
            drafting,
            swapper=swapper,
        )

    def swapper(self, blocks: KvBlocks, config: EngineConfig) -> CudaSwapper:
        """Copies blocks to the config's slots and back. Raises `ConfigError` where there is no
        memory for the slots."""
        return CudaSwapper(blocks, config.num_swap_slots)

    def for_heads(self, decoder: Model, platform: CudaPlatform) -> Served:
        """The model's embedding and head, as draft heads read them."""
        return decoder

    def head(self, decoder: Model, platform: CudaPlatform) -> DeviceHead:
        """The vocabulary head, or this rank's rows of it."""
        return WholeHead(decoder.lm_head)

    def agreed(self, number: int) -> int:
        """The least of the numbers of all ranks; returns when each has come here."""
        return number

    def begin(self) -> None:
        """Returns when every rank has compiled its kernels: from now on launches of ranks wait for
        each other."""


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Draft heads and their weights on the GPU, of the served model's dtype."""

    config: HeadsConfig
    weights: Weights
    shard: Shard = WHOLE
    """The part of the vocabulary that the weights have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """The served model and its drafter on one rank of an engine."""

    served: LoadedModel
    draft: LoadedModel | None
    heads: LoadedHeads | None


def load_whole(
    request: BuildRequest,
    device: torch.device,
    progress: Progress,
    hooks: Hooks,
    place: Callable[[Callable[[], EngineWeights]], EngineWeights],
) -> LoadedEngine:
    """Loads whole models. `place` gives weights their place, and has them loaded if need be. Raises
    `ConfigError`."""
    draft = request.draft
    heads = request.heads

    def weights_of(each: BuildRequest) -> Weights:
        forms = hooks.stored_forms(each)
        stored = StoredWeights(request=each, weights=load_weights(each, device, progress, forms))
        return hooks.prepare_weights(stored, progress)

    def load() -> EngineWeights:
        return EngineWeights(
            served=weights_of(request),
            draft=None if draft is None else weights_of(draft),
            heads=None if heads is None else load_heads_weights(request, device, WHOLE),
        )

    def model_of(each: BuildRequest, weights: Weights) -> LoadedModel:
        return LoadedModel(each.model, weights, KV_DTYPES[each.kv_format], each.is_tree)

    placed = place(load)
    return LoadedEngine(
        served=model_of(request, placed.served),
        draft=None if draft is None or placed.draft is None else model_of(draft, placed.draft),
        heads=None if heads is None or placed.heads is None else LoadedHeads(heads, placed.heads),
    )


def load_heads(request: BuildRequest, device: torch.device, shard: Shard) -> LoadedHeads | None:
    """Loads draft heads, if there are any. Raises `ConfigError`."""
    if request.heads is None:
        return None
    return LoadedHeads(request.heads, load_heads_weights(request, device, shard), shard)
