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
    """A weight is rounded to the model's dtype: what is made of it is what a dense layer of these
    weights makes."""

    kind = "ordered"

    def __init__(self, weight: ByteWeight, dtype: torch.dtype) -> None:
        """Takes the memory of the weight's values."""
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.weight: PackedWords = pack_in_place(weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, expanded_twin(self.weight, self.dtype))


def order_linears(weights: Weights, *, rounds_tokens: bool) -> Weights:
    """The weights with those of eight bits put in order, in place; `rounds_tokens`: those made for
    rounded tokens are multiplied with such, but for experts."""
    linears: dict[str, Linear] = {}
    for name, each in weights.linears.items():
        if (
            rounds_tokens
            and isinstance(each, Int8Linear | Fp8Linear)
            and each.weight.rounds_tokens
            and w8a8.fits(each.weight)
        ):
            linears[name] = RoundedLinear(each.weight)
        else:
            linears[name] = _ordered(each)
    experts = {
        name: replace(stack, linear=_ordered(stack.linear))
        for name, stack in weights.experts.items()
    }
    return replace(weights, linears=linears, experts=experts)


def _ordered(linear: Linear) -> Linear:
    if isinstance(linear, Int8Linear | Fp8Linear):
        return OrderedLinear(linear.weight, linear.dtype)
    return linear
