"""The layers of an encoder on an NVIDIA GPU as CUDA graphs of a few sizes: the host launches the
kernels of a small step more slowly than the device computes them."""

from __future__ import annotations

from functools import partial

import torch

from headwater.kernels.attention.mutual_attention import QUERIES

from ...layers.platform import EncoderPlatform
from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder
from ..device.cuda_graphs import Graphs
from .text_layers import TextLayers

SIZES = (128, 256, 512, 1024, 2048)
"""Tokens of graphs. A step is computed by the next one; larger steps are launched as they are."""


class TextGraphs(TextLayers):
    """See `Layers`. Tokens of a graph behind those of the step are computed in vain."""

    def __init__(self, encoder: Encoder, platform: EncoderPlatform, most_texts: int) -> None:
        super().__init__(encoder, platform, most_texts)
        self._plan: torch.Tensor = platform.plan_texts([1])
        """Plan of a text: rows of numbers, which are zeros for no text."""
        self._most_texts = most_texts
        self._graphs = Graphs()
        self._batches: dict[int, TextBatch] = {}
        self.preparations = [partial(self._prepared, size) for size in SIZES]

    def hidden(self, taken: TextBatch) -> torch.Tensor:
        num_tokens = len(taken.token_ids)
        size = next((each for each in SIZES if each >= num_tokens), None)
        batch = None if size is None else self._batch(size)
        if size is None or batch is None or len(taken.texts) > len(batch.texts):
            return super().hidden(taken)
        _fill(batch.token_ids, taken.token_ids)
        _fill(batch.positions, taken.positions)
        _fill(batch.texts, taken.texts)
        assert batch.types is not None
        _fill(batch.types, batch.types[:0] if taken.types is None else taken.types)
        launch = partial(self._encoder.forward, batch)
        return self._graphs.replay(size, launch, launch)[:num_tokens]

    def _prepared(self, size: int) -> None:
        launch = partial(self._encoder.forward, self._batch(size))
        self._graphs.prepare(size, launch, launch)

    def _batch(self, size: int) -> TextBatch:
        """Memory that the graph of a size reads its step from."""
        if size not in self._batches:
            tokens = torch.zeros(size, dtype=torch.int64, device=self._plan.device)
            # A text has a row for each whole stretch of its tokens, and one for the rest.
            num_rows = size // QUERIES + min(self._most_texts, size)
            self._batches[size] = TextBatch(
                token_ids=tokens,
                positions=tokens.clone(),
                texts=self._plan.new_zeros(num_rows, self._plan.shape[1]),
                types=tokens.clone(),
            )
        return self._batches[size]


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values, and zeros behind them."""
    target[: len(values)] = values
    target[len(values) :] = 0
