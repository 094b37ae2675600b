"""Draft model or draft heads on a GPU, before there is an executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headwater.kernels.launch.compile_ahead import CompileAhead

from ...config import ConfigError, EngineConfig
from ...heads.heads_config import HeadsConfig
from ...heads.medusa import Medusa
from ...heads.registry import ChainHeads, chain_heads
from ...heads.served import Served
from ...layers.linear.kinds import Weights
from ...models.model import Model, model_class
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_tree import TreePlatform
from ...weights.model_config import ModelConfig
from ...weights.shards import WHOLE, Shard
from ..drafter.cuda_draft_model import drafting_config
from ..drafter.cuda_drafters import Make, by_chain, by_model, by_places
from ..exit.head_part import HeadPart
from ..model.kv_blocks import KvBlocks, KvLayout
from ..tiers.cuda_swapper import CudaSwapper
from .cuda_parts import CudaParts
from .gpu_memory import measure


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and its weights on the GPU."""

    config: ModelConfig
    weights: Weights
    kv_dtype: torch.dtype
    is_tree: bool
    """Whether bits are those of `numerics` tree."""

    def platform(self, config: EngineConfig) -> CudaPlatform:
        return (TreePlatform if self.is_tree else CudaPlatform).of(self.config, config)

    def on(self, platform: CudaPlatform, max_model_len: int) -> Model:
        return model_class(self.config)(self.config, self.weights, platform, max_model_len)

    @property
    def kv_layout(self) -> KvLayout:
        return KvLayout.of(self.config, self.kv_dtype)

    @property
    def has_head(self) -> bool:
        """Whether the vocabulary head is here, or a part of it."""
        return True

    def parts(
        self,
        decoder: Model,
        platform: CudaPlatform,
        config: EngineConfig,
        blocks: KvBlocks,
        *,
        swapper: CudaSwapper | None,
        make: Make | None,
        looks_at_all: bool,
    ) -> CudaParts:
        """Parts of the executor that computes plans with the model; see `CudaParts`."""
        return CudaParts(
            decoder,
            platform,
            config,
            blocks,
            swapper=swapper,
            make=make,
            looks_at_all=looks_at_all,
        )

    def swapper(self, blocks: KvBlocks, config: EngineConfig) -> CudaSwapper:
        """Copies blocks to the config's slots and back. Raises `ConfigError` where there is no
        memory for the slots."""
        return CudaSwapper(blocks, config.num_swap_slots)

    def for_heads(self, decoder: Model, platform: CudaPlatform) -> Served:
        """The model's embedding and head, as draft heads read them."""
        return decoder

    def head_part(self, platform: CudaPlatform) -> HeadPart | None:
        """This rank's part of the vocabulary head; None: ranks do not divide it."""
        return None

    def agreed(self, number: int) -> int:
        """The least of the numbers of all ranks; returns when each has come here."""
        return number

    def begin(self) -> None:
        """Returns when every rank has compiled what it launches: from now on launches of one wait
        for those of others."""


@dataclass(frozen=True, slots=True)
class LoadedHeads:
    """Draft heads and their weights on the GPU, of the served model's dtype."""

    config: HeadsConfig
    weights: Weights
    shard: Shard = WHOLE
    """The part of the vocabulary that the weights have."""


class Drafting(Protocol):
    """Draft model or draft heads, before there is an executor."""

    kv_layouts: list[KvLayout]
    looks_at_all: bool
    """Whether it is shown the hidden states of all tokens."""

    def measure(self, ahead: CompileAhead) -> int:
        """Bytes of the activations of its largest step."""

    def make(self, config: EngineConfig, kv_caches: Sequence[torch.Tensor]) -> Make:
        """With the caches of its layouts."""


class ModelDrafting:
    """See `Drafting`."""

    looks_at_all = False

    def __init__(self, draft: LoadedModel, config: EngineConfig) -> None:
        self.kv_layouts = [draft.kv_layout]
        self._config = drafting_config(config)
        self._platform = draft.platform(config)
        self._decoder = draft.on(self._platform, config.max_model_len)
        self._head_part = draft.head_part(self._platform)

    def measure(self, ahead: CompileAhead) -> int:
        return measure(self._decoder, self._platform, self.kv_layouts[0], self._config, ahead).step

    def make(self, config: EngineConfig, kv_caches: Sequence[torch.Tensor]) -> Make:
        return by_model(self._decoder, self._platform, config, kv_caches[0], self._head_part)


class HeadsDrafting:
    """See `Drafting`. They are small beside the served model, so their steps take less memory than
    its steps."""

    def __init__(
        self, heads: LoadedHeads, served: Served, decoder: Model, config: EngineConfig
    ) -> None:
        """`served`: what the heads read of the decoder. Raises `ConfigError` where its work list
        does not serve them."""
        layer = heads.config.layer
        self._decoder = decoder
        self.kv_layouts = [] if layer is None else [KvLayout.of(layer, decoder.dtype)]
        self._platform = CudaPlatform.of(layer or served.config, config)
        self._medusa: Medusa | None = None
        self._chain: ChainHeads | None = None
        what = heads.config, heads.weights, self._platform, served, config.max_model_len
        if layer is None:
            self._medusa = Medusa(*what)
            self.looks_at_all = True
            return
        ours, theirs = (model.num_heads // model.num_kv_heads for model in (layer, served.config))
        if ours != theirs:
            allowed = (
                f"heads with {theirs} query heads a key head, as the served model; these "
                f"have {ours}"
            )
            raise ConfigError("draft_heads", heads.config.kind, allowed)
        self._chain = chain_heads(*what, heads.shard)
        self.looks_at_all = self._chain.looks_at_all

    def measure(self, ahead: CompileAhead) -> int:
        return 0

    def make(self, config: EngineConfig, kv_caches: Sequence[torch.Tensor]) -> Make:
        if self._medusa is not None:
            return by_places(self._medusa, self._decoder, self._platform, config)
        assert self._chain is not None
        return by_chain(self._chain, self._decoder, self._platform, config, kv_caches[0])
