"""The platform under examination in one type of weights: its inputs, and the adapter to how it takes weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.conformance.case import ALLOWED
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.platforms.device import Device
from headwater.engine_core.weights.checkpoint import DTYPES
from headwater.kernels.packed_linear import can_pack, pack

MAX_MODEL_LEN = 512
EPS = 1e-5
NEEDED = (
    *("device", "sampling", "plan_attention", "attention", "rms_norm", "add_rms_norm", "qk_norm_rope_store_kv"),
    *("linear", "linear_silu_mul"),
)
"""What a platform has to offer."""


class Subject:
    """Inputs are random, from one seed, the same on every machine."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self.flags, self.dtype_name, self.dtype = device, device.capabilities, dtype, DTYPES[dtype]
        self.allowed = ALLOWED[dtype]
        self._generator = torch.Generator().manual_seed(1)

    def size(self, least: int) -> int:
        """The smallest size of at least so many that the platform serves."""
        multiple = self.flags.size_multiple
        return -(-least // multiple) * multiple

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """On the host, in the type of the weights."""
        return (torch.randn(shape, generator=self._generator) * scale).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def platform(
        self, *, heads: int = 2, kv_heads: int = 1, head_dim: int = 64, hidden: int = 64, block_size: int = 0
    ) -> Any:
        """The platform for a model of these sizes."""
        model = ModelConfig(
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
            qkv_bias=False,
        )
        config = EngineConfig(
            block_size=block_size or self.flags.block_sizes[0],
            num_blocks=1024,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
        )
        return self.device.Platform.of(model, config)

    def linear_kinds(self) -> tuple[str, ...]:
        """Of those that the platform has a product for, the kinds that this machine can make weights of."""
        return tuple(kind for kind in self.flags.linear_kinds if kind != "packed" or can_pack(self.dtype))

    def linear(self, platform: Any, weight: Tensor, kind: str = "dense") -> Callable[[Tensor], Tensor]:
        """The platform's product with a weight [N, K]; how a platform takes weights is known here and nowhere else in
        the suite."""
        bound = self._bound(platform, weight, kind)
        return lambda x: platform.linear(x, bound)

    def gated_linear(self, platform: Any, weight: Tensor, kind: str = "dense") -> Callable[[Tensor], Tensor]:
        """As `linear`, of a weight [2 I, K] and gated."""
        bound = self._bound(platform, weight, kind)
        return lambda x: platform.linear_silu_mul(x, bound)

    def activate(self, platform: Any, width: int) -> Callable[[Tensor], Tensor]:
        """The activation of [T, width]: a gated product with the identity, whose sums have one term."""
        return self.gated_linear(platform, torch.eye(width, dtype=self.dtype))

    def _bound(self, platform: Any, weight: Tensor, kind: str) -> Tensor:
        weight = pack(weight) if kind == "packed" else weight.to(platform.device)
        if hasattr(self.device, "prepare_products"):
            self.device.prepare_products(platform, weight, (1, 2, 64))
        return weight


def rows_of(x: Tensor, items: Sequence[int], platform: Any) -> Tensor:
    """Some rows of an input on the host, on the platform's device."""
    return x[list(items)].to(platform.device)
