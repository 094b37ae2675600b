"""Weights of eight bits in the order in which Hopper's kernel reads them, made when a model is
loaded; a model's file has none."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.kernels.gemm import w8a8
from headwater.kernels.gemm.byte_gemm import expanded_twin, pack_in_place
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.quant.byte_weights import ByteWeight

from .fp8 import Fp8Linear
from .int8 import Int8Linear
from .kinds import Weights
from .linear import Linear
from .rounded import RoundedLinear


class OrderedLinear(Linear):
    """Weights of eight bits, expanded to the model's dtype: results equal those of a dense layer
    with these weights."""

    kind = "ordered"

    def __init__(self, weight: ByteWeight, dtype: torch.dtype) -> None:
        """Takes the memory of the weight's values."""
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.weight: PackedWords = pack_in_place(weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, expanded_twin(self.weight, self.dtype))


def order_linears(weights: Weights, *, rounds_tokens: bool) -> Weights:
    """Reorders the weights of eight bits in place; `rounds_tokens`: weights made for 8-bit
    activations are multiplied with such."""
    experts_round = rounds_tokens and all(
        _fits(stack.linear, stack.num_experts) for stack in weights.experts.values()
    )
    linears = {name: _ordered(each, rounds=rounds_tokens) for name, each in weights.linears.items()}
    experts = {
        name: replace(stack, linear=_ordered(stack.linear, rounds=experts_round))
        for name, stack in weights.experts.items()
    }
    return replace(weights, linears=linears, experts=experts)


def _ordered(linear: Linear, *, rounds: bool) -> Linear:
    if not isinstance(linear, Int8Linear | Fp8Linear):
        return linear
    if rounds and _fits(linear):
        return RoundedLinear(linear.weight)
    return OrderedLinear(linear.weight, linear.dtype)


def _fits(linear: Linear, num_experts: int = 1) -> bool:
    """Whether a weight was made for rounded tokens, and kernels multiply it with such."""
    return (
        isinstance(linear, Int8Linear | Fp8Linear)
        and linear.weight.rounds_tokens
        and w8a8.fits(linear.weight, num_experts)
    )
