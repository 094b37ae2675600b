"""The layers of a model with its KV cache, computed at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...layers.batch import LayerCaches
from ..entry.eager_entry import StepBatch

Forward = Callable[..., torch.Tensor]
"""Type of `Model.forward`, called with a batch, the KV cache, ends and inputs."""


class EagerLayers:
    """See `Layers`."""

    def __init__(self, forward: Forward, kv_cache: LayerCaches) -> None:
        self._forward = forward
        self._kv_cache = kv_cache

    def adopt(self, forward: Forward) -> None:
        """Computes later steps with another model of the same shapes."""
        self._forward = forward

    def hidden(self, taken: StepBatch) -> torch.Tensor:
        return self._forward(taken.batch, self._kv_cache, ends=taken.ends, inputs=taken.inputs)
