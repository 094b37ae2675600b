"""Drafting on a GPU before there is an executor: its memory, and how its drafter is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headwater.kernels.launch.compile_ahead import CompileAhead

from ...config import ConfigError, EngineConfig
from ...heads.medusa import Medusa
from ...heads.registry import chain_heads
from ...heads.served import Served
from ...models.model import Model
from ...platforms.cuda import CudaPlatform
from ...weights.model_config import ModelConfig
from ..drafter.cuda_draft_model import drafting_config
from ..drafter.cuda_drafter import CudaDrafter
from ..drafter.cuda_drafters import (
    Drafted,
    NewDrafter,
    chain_drafter,
    model_drafter,
    parallel_drafter,
)
from ..drafter.none import NoDrafter
from ..model.kv_blocks import KvLayout
from .cuda_model import LoadedHeads, LoadedModel
from .gpu_memory import measure


class Drafting(NewDrafter, Protocol):
    """A draft model, draft heads or neither, before there is an executor."""

    kv_layouts: list[KvLayout]

    def measure(self, ahead: CompileAhead) -> int:
        """Bytes of the activations of its largest step."""


class NoDrafting:
    """See `Drafting`: drafts are looked up, if there are any."""

    looks_at_all = False
    writes_drafts = False

    def __init__(self) -> None:
        self.kv_layouts: list[KvLayout] = []

    def measure(self, ahead: CompileAhead) -> int:
        return 0

    def drafter(
        self, drafted: Drafted, config: EngineConfig, kv_caches: Sequence[torch.Tensor]
    ) -> CudaDrafter:
        return NoDrafter(config.max_draft_tokens)


class ModelDrafting:
    """See `Drafting`: a draft model."""

    looks_at_all = False
    writes_drafts = True

    def __init__(self, draft: LoadedModel, config: EngineConfig) -> None:
        self.kv_layouts = [draft.kv_layout()]
        self._config = drafting_config(config)
        self._platform = draft.platform(config)
        self._decoder = draft.on(self._platform, config.max_model_len)
        self._head = draft.head(self._decoder, self._platform)

    def measure(self, ahead: CompileAhead) -> int:
        return measure(self._decoder, self._platform, self.kv_layouts[0], self._config, ahead).step

    def drafter(
        self, drafted: Drafted, config: EngineConfig, kv_caches: Sequence[torch.Tensor]
    ) -> CudaDrafter:
        given = self._decoder, self._head, self._platform, config, kv_caches[0]
        return model_drafter(drafted, *given)


class ParallelDrafting:
    """See `Drafting`: heads each of which drafts one position (Medusa). They are much smaller than
    the served model, so their steps take less memory than its steps."""

    looks_at_all = True
    writes_drafts = True

    def __init__(
        self, heads: LoadedHeads, served: Served, decoder: Model, config: EngineConfig
    ) -> None:
        """`served`: the parts of the decoder that the heads read."""
        self.kv_layouts: list[KvLayout] = []
        self._decoder = decoder
        self._platform = CudaPlatform.of(served.config, config)
        what = heads.config, heads.weights, self._platform, served, config.max_model_len
        self._heads = Medusa(*what)

    def measure(self, ahead: CompileAhead) -> int:
        return 0

    def drafter(
        self, drafted: Drafted, config: EngineConfig, kv_caches: Sequence[torch.Tensor]
    ) -> CudaDrafter:
        return parallel_drafter(drafted, self._heads, self._decoder, self._platform, config)


class ChainDrafting:
    """See `ParallelDrafting`: heads of one decoder layer, which draft one token after another
    (EAGLE)."""

    writes_drafts = True

    def __init__(
        self,
        heads: LoadedHeads,
        layer: ModelConfig,
        served: Served,
        decoder: Model,
        config: EngineConfig,
    ) -> None:
        """Raises `ConfigError` where the work list of the decoder does not serve the layer."""
        ours, theirs = (model.num_heads // model.num_kv_heads for model in (layer, served.config))
        if ours != theirs:
            allowed = (
                f"heads with {theirs} query heads a key head, as the served model; these "
                f"have {ours}"
            )
            raise ConfigError("draft_heads", heads.config.kind, allowed)
        self.kv_layouts = [KvLayout.of(layer, decoder.dtype)]
        self._decoder = decoder
        self._platform = CudaPlatform.of(layer, config)
        what = heads.config, heads.weights, self._platform, served, config.max_model_len
        self._heads = chain_heads(*what, heads.shard)
        self.looks_at_all = self._heads.looks_at_all

    def measure(self, ahead: CompileAhead) -> int:
        return 0

    def drafter(
        self, drafted: Drafted, config: EngineConfig, kv_caches: Sequence[torch.Tensor]
    ) -> CudaDrafter:
        given = self._heads, self._decoder, self._platform, config, kv_caches[0]
        return chain_drafter(drafted, *given)


def drafting_of(
    served: LoadedModel,
    draft: LoadedModel | None,
    heads: LoadedHeads | None,
    decoder: Model,
    platform: CudaPlatform,
    config: EngineConfig,
) -> Drafting:
    """The draft model or the heads beside the served model, of which `decoder` is the part here;
    or neither. Raises `ConfigError`."""
    if draft is not None:
        return ModelDrafting(draft, config)
    if heads is None:
        return NoDrafting()
    read = served.for_heads(decoder, platform)
    if (layer := heads.config.layer) is None:
        return ParallelDrafting(heads, read, decoder, config)
    return ChainDrafting(heads, layer, read, decoder, config)
