"""Contract of a model: methods that executors call."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol

import torch

from ..executor import Int32Array
from ..layers.batch import ForwardBatch, LayerCaches
from ..layers.embedding import Embedding
from ..layers.linear.kinds import Weights
from ..layers.lm_head import LMHead
from ..layers.platform import Platform
from ..weights.layout import Layout
from ..weights.model_config import ModelConfig
from ..weights.names import CheckpointNames
from . import registry


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a batch whose hidden states are needed. For all others the last layer computes
    keys and values only."""

    tokens: torch.Tensor
    """Integers [E] into the batch."""
    attention_plan: Any
    """The platform's attention plan, in which each of these tokens is a decode row."""


@dataclass(slots=True)
class LayerInputs:
    """Hidden states, of every token of the batch, that a forward pass returns in addition to its
    result."""

    layers: tuple[int, ...]
    """Layers whose inputs are wanted, 0 … layers of the model − 1."""
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    """Residual stream [T, H] before each wanted layer, by layer; copies, there when the pass has
    returned."""

    def take(self, layer: int, residual: torch.Tensor) -> None:
        """Copies the residual stream if this layer is wanted. Called before each layer, which adds
        to the stream in place."""
        if layer in self.layers:
            self.states[layer] = residual.clone()


class LastNorm(Protocol):
    """The norm behind the last layer."""

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual [T, H] += x, which may be in place; what is made of the sum."""


class Model(Protocol):
    """Token rows in, hidden states and logits out. Holds weights; the KV cache is the caller's."""

    names: ClassVar[CheckpointNames]
    reads_page_groups: ClassVar[bool]
    """Whether its pass reads a batch by page groups; otherwise all layers share one group."""
    config: ModelConfig
    embedding: Embedding
    dtype: torch.dtype
    lm_head: LMHead
    final_norm: LastNorm

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        """The platform is prepared for these weights."""

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        """Every weight of a model with this config."""

    @staticmethod
    def adds_products(config: ModelConfig) -> bool:
        """Whether `RMSNorm.add` receives every product whose inputs ranks divide (`Split.INPUTS`),
        and nothing else: then a platform may sum the ranks' parts as it adds them."""

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: LayerCaches,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [T, H], or [E, H] of the ends. kv_cache [layers, 2, num_blocks, Hk,
        block_size, D], or a tensor of each layer, takes the batch's keys and values. The attention
        plan is the platform's, or one of each page group of the batch, made here when it is not
        given. With fewer layers than there are, the first ones and the last: it
        launches what the whole model launches, and the result is of no use. `inputs` takes the
        hidden states that it names; without it nothing else is launched. Python reads no numbers of
        the batch here: an executor may record the pass, and compute other batches of its shape
        without Python."""

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        """The last num_wanted[r] tokens of each request, [R]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V] in the weights' dtype."""


def score_head_of(model: Model) -> torch.Tensor | None:
    """float32 [N, H] from a pooled state to scores of labels; None: the model has no labels, or is
    one of another distribution."""
    head: torch.Tensor | None = getattr(model, "score_head", None)
    return head


def reads_page_groups(config: ModelConfig) -> bool:
    """Whether the architecture's pass reads a batch by page groups; one of another distribution may
    not say."""
    return getattr(model_class(config), "reads_page_groups", False)


def model_class(config: ModelConfig) -> type[Model]:
    """The class of the architecture that the config names."""
    module, _, name = registry.code_of(config).partition(":")
    found: type[Model] = getattr(import_module(module), name)
    return found
