"""The layers of an encoder."""

from __future__ import annotations

import torch

from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder


class TextLayers:
    """See `Layers`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def hidden(self, taken: TextBatch) -> torch.Tensor:
        return self._encoder.forward(taken)
