"""The layers of an encoder on an NVIDIA GPU as CUDA graphs of a few sizes: the host launches the
kernels of a small step more slowly than the device computes them."""

from __future__ import annotations

from functools import partial

import torch

from headwater.kernels.attention.mutual_attention import QUERIES

from ...config import EngineConfig
from ...layers.platform import EncoderPlatform
from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder
from ..device.cuda_graphs import Graphs
from .text_layers import TextLayers

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, *range(2048, 8193, 1024))
"""Tokens of graphs. The smallest that holds a step computes it; larger steps are launched as they
are. On an H200 8,192 tokens of bge-m3 in texts of 16 take 11.8 ms as a graph and 19.0 ms launched
(2026-11-30)."""


class TextGraphs(TextLayers):
    """See `Layers`. Steps are launched as they are until `preparations` have captured their graph.
    What a graph computes behind the tokens of a step is not read."""

    def __init__(self, encoder: Encoder, platform: EncoderPlatform, config: EngineConfig) -> None:
        super().__init__(encoder)
        self._graphs = Graphs()
        row: torch.Tensor = platform.plan_texts([1])
        self._batches = {
            size: _empty_batch(size, min(config.max_num_seqs, size), row)
            for size in SIZES
            if size <= config.longest_step
        }
        # Largest first: its memory serves all others.
        self.preparations = [partial(self._capture, size) for size in reversed(self._batches)]

    def hidden(self, taken: TextBatch) -> torch.Tensor:
        num_tokens = len(taken.token_ids)
        size = next((each for each in self._batches if each >= num_tokens), 0)
        if size not in self._graphs:
            return super().hidden(taken)
        batch = self._batches[size]
        batch.token_ids[:num_tokens] = taken.token_ids
        batch.positions[:num_tokens] = taken.positions
        _fill(batch.texts, taken.texts)
        assert batch.types is not None
        _fill(batch.types, batch.types[:0] if taken.types is None else taken.types)
        launch = partial(self._encoder.forward, batch)
        return self._graphs.replay(size, launch, launch)[:num_tokens]

    def _capture(self, size: int) -> None:
        launch = partial(self._encoder.forward, self._batches[size])
        self._graphs.prepare(size, launch, launch)


def _empty_batch(size: int, most_texts: int, plan_row: torch.Tensor) -> TextBatch:
    """Memory that the graph of a size reads a step from. Token 0 at position 0 stands for none, and
    a row of zeros in the plan for no text."""
    tokens = torch.zeros(size, dtype=torch.int64, device=plan_row.device)
    # A text has a row for each whole stretch of its tokens, and one for the rest.
    num_rows = size // QUERIES + most_texts
    return TextBatch(
        token_ids=tokens,
        positions=tokens.clone(),
        texts=plan_row.new_zeros(num_rows, plan_row.shape[1]),
        types=tokens.clone(),
    )


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Writes values, and zeros after them."""
    target[: len(values)] = values
    target[len(values) :] = 0
