"""Hooks that a platform's module may have, each with its default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ...layers.linear.kinds import Weights
from ...layers.platform import Platform
from ...models.model import Model
from ...options import BuildRequest, Progress
from ...platforms.device import Device
from ...platforms.stored_weights import StoredForms, StoredWeights
from ..model.eager_layers import Forward


def _expanded(request: BuildRequest) -> StoredForms:
    return StoredForms()


def _as_loaded(stored: StoredWeights, progress: Progress) -> Weights:
    return stored.weights


def _no_kernels(platform: Platform, weights: Weights, progress: Progress) -> None:
    pass


def _own_pass(model: Model, platform: Platform, max_blocks: int) -> Forward:
    return model.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """See `OPTIONAL` of `platforms/device.py`. Hooks that build no executor are not among them."""

    stored_forms: Callable[[BuildRequest], StoredForms] = _expanded
    prepare_weights: Callable[[StoredWeights, Progress], Weights] = _as_loaded
    prepare_kernels: Callable[[Platform, Weights, Progress], None] = _no_kernels
    forward_pass: Callable[[Model, Platform, int], Forward] = _own_pass

    @classmethod
    def of(cls, device: Device) -> Hooks:
        names = [each.name for each in fields(cls)]
        return cls(**{name: getattr(device, name) for name in names if hasattr(device, name)})
