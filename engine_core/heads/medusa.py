"""Medusa: heads over the served model's last hidden state, each of which drafts one token further
ahead. Source: Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple
decoding heads", 2024, with the published code."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.nn.functional import silu

from ..config import require
from ..layers.linear.kinds import Weights
from ..layers.platform import Platform
from ..weights.layout import Layout, Split, linear, table
from ..weights.model_config import ModelConfig
from ..weights.model_file import Tensors
from .checkpoint import HeadsFile, Shapes
from .heads_config import HeadsConfig
from .served import Served


class Medusa:
    """num_heads heads of some residual blocks, x + silu(W x + b), and a product with the
    vocabulary."""

    def __init__(
        self,
        config: HeadsConfig,
        weights: Weights,
        platform: Platform,
        served: Served,
        max_model_len: int,
    ) -> None:
        self.num_heads = config.num_heads
        self.hidden_size = served.config.hidden_size
        linears = weights.linears
        tensors = weights.tensors
        self._blocks = [
            [
                (
                    platform.linear(linears[f"{i}.{j}.linear.weight"]),
                    tensors[f"{i}.{j}.linear.bias"],
                )
                for j in range(config.num_blocks)
            ]
            for i in range(config.num_heads)
        ]
        self._heads = [
            platform.linear(linears[f"{i}.{config.num_blocks}.weight"])
            for i in range(config.num_heads)
        ]

    @staticmethod
    def published(config: HeadsConfig, served: ModelConfig) -> tuple[Shapes, Shapes]:
        return {name: spec.shape for name, spec in Medusa.layout(config, served, ()).items()}, {}

    @staticmethod
    def collect(file: HeadsFile, config: HeadsConfig, dtype: torch.dtype) -> Tensors:
        collected = {}
        for name, tensor in file.tensors():
            require(
                tensor.is_floating_point(),
                f"dtype of tensor {name}",
                str(tensor.dtype),
                "weights in floating point",
            )
            collected[name] = tensor.to(dtype).contiguous()
        return collected

    @staticmethod
    def layout(config: HeadsConfig, served: ModelConfig, names: Collection[str]) -> Layout:
        """Layout under the published names."""
        hidden = served.hidden_size
        last = config.num_blocks
        found = {}
        for i in range(config.num_heads):
            for j in range(last):
                found[f"{i}.{j}.linear.weight"] = linear(hidden, hidden)
                found[f"{i}.{j}.linear.bias"] = table(hidden)
            found[f"{i}.{last}.weight"] = linear(served.vocab_size, hidden, split=Split.VOCABULARY)
        return found

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the token head + 2 positions after hidden [R, H], normed; on a rank
        those of its part of the vocabulary."""
        for product, bias in self._blocks[head]:
            hidden = hidden + silu(product(hidden) + bias)
        return self._heads[head](hidden)
