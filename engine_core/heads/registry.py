"""Classes by kind of draft heads; checks that the heads of a folder fit a served model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch
from ..layers.linear import kinds
from ..layers.linear.kinds import Weights
from ..layers.platform import Platform
from ..models.model import LastTokens
from ..weights.json_object import read_object
from ..weights.layout import Layout
from ..weights.model_config import ModelConfig
from ..weights.model_file import Tensors
from ..weights.shards import WHOLE, Shard
from . import eagle3
from .checkpoint import HeadsFile, Shapes
from .eagle import Eagle
from .eagle3 import Eagle3
from .heads_config import EAGLE, EAGLE3, MEDUSA, MTP, HeadsConfig
from .medusa import Medusa
from .mtp import Mtp
from .served import Served


class ChainHeads(Protocol):
    """Heads that draft one token after another. They read pairs of a position's hidden state and
    the token after it, stored at that position."""

    config: ModelConfig
    """Config of their layer, which caches keys and values."""
    layers: tuple[int, ...]
    """Layers of the served model whose inputs they read."""
    looks_at_all: bool
    """Whether they read the normed hidden states of all tokens."""

    def features(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Features of T tokens [T, H], from the hidden states of the served model that the heads
        named."""

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        """The last num_wanted[r] pairs of each row, [R]."""

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, H], or [E, H] of the last tokens, from which `logits` are made, for
        pairs of features [T, H] and tokens of the batch; they serve as features of the next
        position. kv_cache [1, 2, num_blocks, Hk, block_size, D] takes keys and values. Without last
        tokens the attention plan is of all pairs."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden [S, H]; on a rank those of its part of the vocabulary."""


class HeadsClass(Protocol):
    """Class that reads heads of one kind from their published file."""

    @staticmethod
    def published(config: HeadsConfig, served: ModelConfig) -> tuple[Shapes, Shapes]:
        """Shapes of the file's tensors: required ones, and optional ones."""

    @staticmethod
    def collect(file: HeadsFile, config: HeadsConfig, dtype: torch.dtype) -> Tensors:
        """The tensors under our names."""

    @staticmethod
    def layout(config: HeadsConfig, served: ModelConfig, names: Collection[str]) -> Layout:
        """Layout of tensors under our names; `names` are the existing ones."""


CLASSES: Mapping[str, HeadsClass] = {MEDUSA: Medusa, EAGLE: Eagle, EAGLE3: Eagle3}


def read_heads(folder: Path, served: ModelConfig) -> HeadsConfig:
    """Reads the config, and names and shapes of tensors. Raises `ConfigError` where they do not fit
    the model."""
    config = HeadsConfig.from_hf(read_object(folder / "config.json"), served)
    file = HeadsFile(folder)
    file.check(*CLASSES[config.kind].published(config, served))
    if config.kind == EAGLE3:
        eagle3.check_map(file, config, served)
    return config


def load_heads(
    folder: Path,
    config: HeadsConfig,
    served: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> Weights:
    """Loads the heads, with weights in the dtype that the served model computes in. Ranks divide
    vocabulary heads and nothing else."""
    cls = CLASSES[config.kind]
    tensors = cls.collect(HeadsFile(folder), config, dtype)
    return kinds.load_weights(
        cls.layout(config, served, tensors.keys()), tensors, dtype, shard, device
    )


def chain_heads(
    config: HeadsConfig,
    weights: Weights,
    platform: Platform,
    served: Served,
    max_model_len: int,
    shard: Shard = WHOLE,
) -> ChainHeads:
    if config.kind == MTP:
        assert config.layer is not None
        return Mtp(config.layer, weights, platform, served, max_model_len)
    if config.kind == EAGLE:
        return Eagle(config, weights, platform, served, max_model_len)
    return Eagle3(config, weights, platform, served, max_model_len, shard)
