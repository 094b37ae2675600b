"""Weights of an engine that is computed eagerly, and others that take their place: loaded beside
steps, adopted between two of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from ...config import ConfigError, EngineConfig
from ...executor import NewWeights
from ...models.model import Model
from ...options import BuildRequest
from ...platforms import loading as platforms
from ..device.mapped_weights import MappedWeights
from ..entry.eager_entry import EagerEntry
from ..exit.eager_sample import EagerSample
from ..model.eager_layers import EagerLayers, Forward
from .hooks import Hooks
from .loader import Loader
from .models import whole_model
from .numerics import numerics_of
from .request import checked


def why_not(request: BuildRequest, device: torch.device) -> str:
    """Why weights may not be replaced, as a sentence; empty: they may."""
    options = request.options
    model = request.model
    has = {
        f"the device is {device.type}": device.type != "cpu",
        "the engine has several ranks": options.layout.num_ranks > 1,
        "the engine takes adapters": options.adapter_memory > 0,
        "the engine keeps blocks in host memory": options.kv_swap_memory > 0,
        "the engine keeps blocks on a disk": options.kv_disk_dir is not None,
        "the engine pulls blocks of others": options.kv_peer_memory > 0,
        "the engine drafts with a model or heads": request.draft is not None
        or request.heads is not None,
        "numerics is tree": request.is_tree,
        "the weights are made, not loaded": options.load_format != "auto",
        "the model has experts": model.experts is not None,
        "the model has states": model.states is not None,
        "the model is an encoder": model.encoder is not None,
        "the model is computed by transformers' code": model.foreign is not None,
    }
    found = next((sentence for sentence, holds in has.items() if holds), "")
    return found and f"{found}; allowed: an engine on a CPU that has nothing of the kind"


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """See `NewWeights`."""

    numerics_id: str
    folder: Path
    served: Model
    forward: Forward


class EagerWeights:
    """See `ReplaceableWeights`."""

    def __init__(
        self,
        request: BuildRequest,
        config: EngineConfig,
        loader: Loader,
        entry: EagerEntry,
        layers: EagerLayers,
        exit: EagerSample,
        mapped: MappedWeights | None,
    ) -> None:
        """`mapped`: what sleep gives back; None: the engine does not sleep."""
        self._request = request
        self._config = config
        self._loader = loader
        self._entry = entry
        self._layers = layers
        self._exit = exit
        self._mapped = mapped

    def load(self, folder: Path) -> LoadedWeights:
        now = self._request.options
        loaded = platforms.load(now.device)
        options = replace(now, model_folder=folder)
        request = checked(options, loaded.device.name, loaded.device.capabilities)
        check_same(self._request, request)
        platform, weights = self._loader.served(request)
        served = whole_model(request, self._config, (platform, weights))
        forward = Hooks.of(loaded.device).forward_pass(served, platform, self._config.max_blocks)
        return LoadedWeights(numerics_of(request, loaded), folder, served, forward)

    def adopt(self, new: NewWeights) -> None:
        assert isinstance(new, LoadedWeights)
        self._entry.adopt(new.served)
        self._layers.adopt(new.forward)
        self._exit.adopt(new.served)
        if self._mapped is not None:
            self._mapped.follow(new.folder)


def check_same(old: BuildRequest, new: BuildRequest) -> None:
    """Raises `ConfigError` for the first thing besides weights in which a model differs."""
    for name in ("dtype", "kv_format", "activations", "rounds_tokens"):
        _check(name, getattr(new, name), getattr(old, name))
    for each in fields(old.model):
        _check(each.name, getattr(new.model, each.name), getattr(old.model, each.name))


def _check(name: str, new: object, old: object) -> None:
    if new != old:
        raise ConfigError(f"{name} of the new weights", new, f"{old}, as of the weights now")
