"""What drafts on a GPU, before there is an executor: its memory, and what makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from headwater.kernels.launch.compile_ahead import CompileAhead

from ...config import ConfigError, EngineConfig
from ...heads.medusa import Medusa
from ...heads.registry import ChainHeads, chain_heads
from ...heads.served import Served
from ...models.model import Model
from ...platforms.cuda import CudaPlatform
from ..drafter.cuda_draft_model import drafting_config
from ..drafter.cuda_drafters import Make, by_chain, by_model, by_places
from .cuda_model import LoadedHeads, LoadedModel
from .gpu_memory import Planes, measure


class Drafting(Protocol):
    """Draft model or draft heads, before there is an executor."""

    planes: list[Planes]
    looks_at_all: bool
    """Whether it is shown the hidden states of all tokens."""

    def measure(self, ahead: CompileAhead) -> int:
        """Bytes of the activations of its largest step."""

    def make(self, config: EngineConfig, kv_caches: Sequence[torch.Tensor]) -> Make:
        """With the caches of its planes."""


class ModelDrafting:
    """See `Drafting`."""

    looks_at_all = False

    def __init__(self, draft: LoadedModel, config: EngineConfig) -> None:
        self.planes = [draft.planes]
        self._config = drafting_config(config)
        self._platform = draft.platform(config)
        self._decoder = draft.on(self._platform, config.max_model_len)
        self._head_shard = draft.head_shard(self._platform)

    def measure(self, ahead: CompileAhead) -> int:
        return measure(self._decoder, self._platform, self.planes[0], self._config, ahead).step

    def make(self, config: EngineConfig, kv_caches: Sequence[torch.Tensor]) -> Make:
        return by_model(self._decoder, self._platform, config, kv_caches[0], self._head_shard)


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
        self.planes = [] if layer is None else [Planes(layer, decoder.dtype)]
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
