"""The layers of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder


class TextLayers:
    """See `Layers`."""

    preparations: Sequence[Callable[[], object]] = ()
    """See `StepExecutor`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def hidden(self, taken: TextBatch) -> torch.Tensor:
        return self._encoder.forward(taken)
