"""Times mixtures of experts on a GPU: the router's choice with the products of chosen experts, of
weights in bf16, and in 8 bits with such tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from headwater.kernels.experts.expert_product import expert_product
from headwater.kernels.experts.rounded_product import rounded_expert_product
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.gemm.w8a8 import W8A8Weight

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, randn, timed

DEPENDENT_TOKENS = 512
"""Most tokens for which a kernel starts while the one before it ends, as in an engine."""


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    num_chosen: int
    weight_bytes: int = 2

    @property
    def expert_bytes(self) -> int:
        return 3 * self.weight_bytes * self.hidden * self.inner

    def num_bytes(self, num_tokens: int) -> float:
        """Expected bytes of the weights of experts that some token chooses, and of activations."""
        share = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * share * self.expert_bytes + 4 * num_tokens * self.hidden

    def flops(self, num_tokens: int) -> int:
        return 6 * num_tokens * self.num_chosen * self.hidden * self.inner


SHAPES = {
    "30B-A3B": Shape(2048, 768, 128, 8),
    "30B-A3B fp8": Shape(2048, 768, 128, 8, weight_bytes=1),
}
Product = Callable[..., torch.Tensor]
"""Tokens, their experts and the weights of these, `dependent` → sums."""
NUM_TOKENS = (1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16_384)


def expert_products() -> Iterator[Figure]:
    """Times each shape by number of tokens, with routers that choose at random."""
    for name, shape in SHAPES.items():
        product = _product(shape)
        for num_tokens in NUM_TOKENS:
            layers = [
                _Layer(shape, num_tokens, product)
                for _ in range(32 if num_tokens <= 4 else 4 if num_tokens <= 2048 else 2)
            ]
            us = timed(layers, replays=7)
            limit = max(
                shape.num_bytes(num_tokens) / BYTES_PER_US,
                shape.flops(num_tokens) * shape.weight_bytes / 2 / FLOPS_PER_US,
            )
            note = (
                f"{shape.num_bytes(num_tokens) / us / 1e6:.2f} TB/s, "
                f"{shape.flops(num_tokens) / us / 1e6:.0f} TFLOP/s"
            )
            yield Figure("experts", f"{name} T={num_tokens}", us, limit, note)


def _product(shape: Shape) -> Product:
    """The product with random weights of one layer; those of 8 bits are e4m3 in blocks."""
    gate_up = randn(shape.num_experts, 2 * shape.inner, shape.hidden) * shape.hidden**-0.5
    down = randn(shape.num_experts, shape.hidden, shape.inner) * shape.inner**-0.5
    if shape.weight_bytes == 2:
        return partial(expert_product, gate_up=gate_up, down=down)
    in_blocks = [
        W8A8Weight(
            values=(each.flatten(0, 1) * each.shape[2] ** 0.5).to(torch.float8_e4m3fn),
            scales=torch.full(
                (len(each) * each.shape[1] // 64, each.shape[2] // 128),
                each.shape[2] ** -0.5,
                device=each.device,
            ),
        )
        for each in (gate_up, down)
    ]
    return partial(
        rounded_expert_product,
        gate_up=in_blocks[0],
        down=in_blocks[1],
        num_experts=shape.num_experts,
    )


class _Layer:
    """A call that routes and multiplies tokens of its own, so that two calls with few tokens share
    few experts."""

    def __init__(self, shape: Shape, num_tokens: int, product: Product) -> None:
        self._x = randn(num_tokens, shape.hidden)
        self._logits = randn(num_tokens, shape.num_experts)
        self._choice = Choice(num_chosen=shape.num_chosen, is_normalized=True)
        self._product = product

    def __call__(self) -> torch.Tensor:
        dependent = len(self._x) <= DEPENDENT_TOKENS
        routes = route(self._logits, self._choice, dependent=dependent)
        return self._product(self._x, *routes, dependent=dependent)
