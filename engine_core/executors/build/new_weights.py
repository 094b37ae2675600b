"""Replacement of the weights of an eagerly computed engine: new ones are loaded beside the steps,
and adopted between two steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from ...capabilities import refusals_of_engine
from ...config import ConfigError, EngineConfig
from ...executor import NewWeights
from ...models.model import Model
from ...options import BuildRequest, ignore_progress
from ...platforms import loading as platforms
from ..device.mapped_weights import MappedWeights
from ..entry.eager_entry import EagerEntry
from ..exit.eager_sample import EagerSample
from ..model.eager_layers import EagerLayers, Forward
from ..ranks.rank import Rank
from .hooks import Hooks
from .loader import Loader
from .models import whole_model
from .numerics import numerics_of
from .request import asked_of, checked


def why_not(request: BuildRequest, rank: Rank) -> str:
    """Reason, as a sentence, why weights cannot be replaced; empty: they can. Options that sleep
    refuses are refused here too: what they keep elsewhere would belong to the old weights."""
    loaded = platforms.load(request.options.device)
    flags = loaded.device.capabilities
    if request.options.kv_swap_memory:
        return "the engine has kv_swap_memory; allowed: one that could sleep and keeps no copies"
    if loaded.device.name != "cpu" or not rank.is_whole or request.options.load_format != "auto":
        return "allowed: an engine of one process on a CPU, of a model's folder"
    sleeping = replace(request.options, takes_turns=True)
    asked = asked_of(sleeping, request.model, request.activations, flags)
    found = refusals_of_engine(asked, flags, loaded.device.name)
    others = (each.allowed for each in found if each.field == "takes_turns")
    other = next(others, "").removeprefix("False with ")
    return other and f"the engine has {other}; allowed: one that could sleep"


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
        rank: Rank,
        entry: EagerEntry,
        layers: EagerLayers,
        exit: EagerSample,
        mapped: MappedWeights | None,
    ) -> None:
        """`mapped`: what sleep gives back; None: the engine does not sleep."""
        self._request = request
        self._config = config
        self._rank = rank
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
        # NOTE: progress of the build is reported by the thread that builds.
        loader = Loader(loaded.device, self._rank, self._config, ignore_progress)
        platform, weights = loader.served(request)
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
