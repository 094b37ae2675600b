"""Times mixtures of experts on a GPU: the router's choice with the products of chosen experts, and
both kinds of products alone where they are made apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headwater.kernels.experts.expert_product import expert_product
from headwater.kernels.experts.route import Choice, route

from .gpu_timing import BYTES_PER_US, FLOPS_PER_US, Figure, randn, timed

DEPENDENT_TOKENS = 512
"""Up to this many tokens kernels start while those before them end, as in an engine."""


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    num_chosen: int

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.inner

    def num_bytes(self, num_tokens: int) -> float:
        """Expected bytes of the weights of experts that some token chooses, and of activations."""
        share = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * share * self.expert_bytes + 4 * num_tokens * self.hidden

    def flops(self, num_tokens: int) -> int:
        return num_tokens * self.num_chosen * self.expert_bytes


SHAPES = {"30B-A3B": Shape(2048, 768, 128, 8)}
NUM_TOKENS = (1, 2, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16_384)


def expert_products() -> Iterator[Figure]:
    """Times each shape by number of tokens, with routers that choose at random."""
    for name, shape in SHAPES.items():
        gate_up = randn(shape.num_experts, 2 * shape.inner, shape.hidden) * shape.hidden**-0.5
        down = randn(shape.num_experts, shape.hidden, shape.inner) * shape.inner**-0.5
        for num_tokens in NUM_TOKENS:
            layers = [
                _Layer(shape, num_tokens, gate_up, down)
                for _ in range(32 if num_tokens <= 4 else 4 if num_tokens <= 2048 else 2)
            ]
            us = timed(layers, replays=7)
            limit = max(
                shape.num_bytes(num_tokens) / BYTES_PER_US, shape.flops(num_tokens) / FLOPS_PER_US
            )
            note = (
                f"{shape.num_bytes(num_tokens) / us / 1e6:.2f} TB/s, "
                f"{shape.flops(num_tokens) / us / 1e6:.0f} TFLOP/s"
            )
            yield Figure("experts", f"{name} T={num_tokens}", us, limit, note)


class _Layer:
    """A call that chooses and multiplies for tokens of its own, so that few tokens of two calls
    share few experts."""

    def __init__(
        self, shape: Shape, num_tokens: int, gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        self._x = randn(num_tokens, shape.hidden)
        self._logits = randn(num_tokens, shape.num_experts)
        self._choice = Choice(num_chosen=shape.num_chosen, is_normalized=True)
        self._gate_up = gate_up
        self._down = down

    def __call__(self) -> torch.Tensor:
        dependent = len(self._x) <= DEPENDENT_TOKENS
        experts, weights = route(self._logits, self._choice, dependent=dependent)
        return expert_product(
            self._x, experts, weights, self._gate_up, self._down, dependent=dependent
        )
