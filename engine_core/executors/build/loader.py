"""Loads what one rank of an engine computes with: operations and weights of the served model, of
the model that drafts, and of draft heads."""

from __future__ import annotations

from dataclasses import replace

from ...config import EngineConfig
from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...options import BuildRequest, Progress
from ...platforms.device import Device
from ...platforms.stored_weights import StoredWeights
from ...weights.model_config import ModelConfig
from ..ranks.rank import Rank
from .hooks import Hooks
from .models import Loaded
from .rank_weights import HEAD, load_draft_weights, load_rank_weights
from .weights import load_heads_weights, load_weights


class Loader:
    """Loads for one rank. Every method may raise `ConfigError`."""

    def __init__(
        self, device: Device, rank: Rank, config: EngineConfig, progress: Progress
    ) -> None:
        self._device = device
        self._hooks = Hooks.of(device)
        self._rank = rank
        self._config = config
        self._progress = progress

    def served(self, request: BuildRequest) -> Loaded:
        """This rank's part of the served model."""
        rank = self._rank
        if rank.is_whole:
            return self._whole(request)
        platform = self._platform(rank.local_config(request.model))
        forms = self._hooks.stored_forms(request)
        weights = load_rank_weights(request, rank, platform.device, self._progress, forms)
        part = f"{rank.part}, in leaves" if request.is_tree else rank.part
        if request.model.experts is not None and request.model.experts.are_whole:
            part += ", whole experts"
        return self._with_kernels(platform, self._prepared(request, weights, part))

    def draft(self, request: BuildRequest) -> Loaded:
        """The model that drafts, with this rank's rows of its vocabulary head."""
        if self._rank.is_whole:
            return self._whole(request)
        shard = self._rank.shard
        platform = self._platform(request.model)
        forms = self._hooks.stored_forms(request)
        weights = load_draft_weights(request, shard, platform.device, self._progress, forms)
        head = {HEAD: weights.linears[HEAD]}
        layers = {name: each for name, each in weights.linears.items() if name != HEAD}
        rows = f"rows of the vocabulary of shard {shard.index} of {shard.size}"
        own = self._prepared(request, replace(weights, linears=head, experts={}), rows)
        # All ranks share the prepared layers that are stored in the folder.
        shared = self._prepared(
            request, replace(weights, linears=layers), "all but the vocabulary head"
        )
        return self._with_kernels(
            platform, replace(shared, linears={**shared.linears, **own.linears})
        )

    def heads(self, request: BuildRequest) -> Loaded:
        """Draft heads, with this rank's part of their vocabulary. Their kernels are those of the
        served model."""
        assert request.heads is not None
        platform = self._platform(request.heads.layer or request.model)
        weights = load_heads_weights(request, platform.device, self._rank.shard)
        stored = StoredWeights(request=request, weights=weights, part="draft heads")
        return platform, self._hooks.prepare_weights(stored, self._progress)

    def _whole(self, request: BuildRequest) -> Loaded:
        platform = self._platform(request.model)
        forms = self._hooks.stored_forms(request)
        weights = load_weights(request, platform.device, self._progress, forms)
        part = "leaves" if request.is_tree else ""
        return self._with_kernels(platform, self._prepared(request, weights, part))

    def _platform(self, model: ModelConfig) -> Platform:
        platform: Platform = self._device.Platform.of(model, self._config)
        return platform

    def _prepared(self, request: BuildRequest, weights: Weights, part: str) -> Weights:
        options = request.options
        folder = options.model_folder if options.load_format == "auto" else None
        stored = StoredWeights(request=request, weights=weights, part=part, folder=folder)
        return self._hooks.prepare_weights(stored, self._progress)

    def _with_kernels(self, platform: Platform, weights: Weights) -> Loaded:
        self._hooks.prepare_kernels(platform, weights, self._progress)
        return platform, weights
