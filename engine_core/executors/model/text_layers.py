"""The layers of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...layers.platform import EncoderPlatform
from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder


class TextLayers:
    """See `Layers`."""

    preparations: Sequence[Callable[[], object]] = ()
    """Functions that make later steps faster, called one by one."""

    def __init__(self, encoder: Encoder, platform: EncoderPlatform, most_texts: int) -> None:
        """`most_texts`: those of a step."""
        self._encoder = encoder

    def hidden(self, taken: TextBatch) -> torch.Tensor:
        return self._encoder.forward(taken)
