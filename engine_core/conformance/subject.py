"""The platform under examination in one type of weights: its inputs, and the adapter to how it
takes weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import EngineConfig
from ..executors.build.hooks import Hooks
from ..layers.linear.dense import DenseLinear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from ..options import BuildRequest, ExecutorOptions
from ..platforms.device import Device
from ..platforms.stored_weights import StoredWeights
from ..weights.latent_config import LatentConfig
from ..weights.model_config import ModelConfig
from ..weights.model_file import DTYPES
from .case import ALLOWED

MAX_MODEL_LEN = 512
EPS = 1e-5
NEEDED = (
    *(
        "device",
        "sampling",
        "plan_attention",
        "attention",
        "rms_norm",
        "add_rms_norm",
        "qk_norm_rope_store_kv",
    ),
    *("linear", "gated_linear", "gate"),
)
"""Names that a platform's module has to offer."""


class Subject:
    """Inputs are random, from one seed, the same on every machine."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device = device
        self.flags = device.capabilities
        self._hooks = Hooks.of(device)
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.allowed = ALLOWED[dtype]
        self._generator = torch.Generator().manual_seed(1)

    def size(self, least: int) -> int:
        """The smallest size of at least so many that the platform serves."""
        multiple = self.flags.size_multiple
        return -(-least // multiple) * multiple

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers on the host, in the type of the weights."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def platform(
        self,
        *,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 64,
        hidden: int = 64,
        block_size: int = 0,
        window: int = 0,
        latent: LatentConfig | None = None,
    ) -> Any:
        """The platform for a model of these sizes."""
        model = replace(_model(heads, kv_heads, head_dim, hidden, window), latent=latent)
        config = EngineConfig(
            block_size=block_size or self.flags.block_sizes[0],
            num_blocks=1024,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
        )
        return self.device.Platform.of(model, config)

    def linear_kinds(self) -> tuple[str, ...]:
        """Dense, and the kind that the platform makes of dense weights on this machine."""
        size = self.size(64)
        dense = DenseLinear(torch.zeros(size, size, dtype=self.dtype))
        return tuple(dict.fromkeys((dense.kind, self._prepared(dense).kind)))

    def linear(self, platform: Any, weight: Tensor, kind: str = "dense") -> Product:
        """Product with a weight [N, K] on the platform."""
        product: Product = platform.linear(self._of_kind(platform, weight, kind))
        return product

    def gated_linear(
        self, platform: Any, weight: Tensor, activation: str, kind: str = "dense"
    ) -> Product:
        """Like `linear`, with a weight [2 I, K] and gated: in one launch where the platform has
        one, as `layers.Mlp`."""
        linear = self._of_kind(platform, weight, kind)
        fused: Product | None = platform.gated_linear(linear, activation)
        product = platform.linear(linear)
        return fused or (lambda x: platform.gate(product(x), activation))

    def _of_kind(self, platform: Any, weight: Tensor, kind: str) -> Linear:
        """The weight as a linear layer of one of `linear_kinds`."""
        linear: Linear = DenseLinear(weight.to(platform.device))
        if kind != linear.kind:
            linear = self._prepared(linear)
        if hasattr(self.device, "prepare_products"):
            self.device.prepare_products(platform, linear, (1, 2, 64))
        return linear

    def _prepared(self, dense: Linear) -> Linear:
        """The only weight of a model, as the platform prepares it."""
        request = BuildRequest(
            options=ExecutorOptions(model_folder=None),
            model=_model(),
            dtype=self.dtype_name,
            kv_format=self.dtype_name,
            activations=self.dtype_name,
        )
        weights = Weights(linears={"weight": dense}, tensors={})
        stored = StoredWeights(request=request, weights=weights)
        return self._hooks.prepare_weights(stored, lambda phase, done, total: None).linears[
            "weight"
        ]


def _model(
    heads: int = 2, kv_heads: int = 1, head_dim: int = 64, hidden: int = 64, window: int = 0
) -> ModelConfig:
    """The config of a model of one layer."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=997,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=EPS,
        rope_theta=10_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        sliding_window=window,
    )


def rows_of(x: Tensor, items: Sequence[int], platform: Any) -> Tensor:
    """Copies some rows of a host tensor to the platform's device."""
    return x[list(items)].to(platform.device)
