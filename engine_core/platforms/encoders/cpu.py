"""Operations of encoders on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.kernels.cpu.encoders.add_layer_norm import add_layer_norm
from headwater.kernels.cpu.encoders.mutual_attention import mutual_attention

from ...layers.linear.linear import Product
from ...layers.platform import BiasedLinear, LayerNormWeights, SumNorm, TextAttention
from ..cpu_products import TEXT_ROWS, CpuProducts

Plan = tuple[list[int], list[int]]
"""Numbers of tokens of texts, and of those that are attended to; of none: all."""


class CpuTexts:
    """See `EncoderPlatform`. The library adds biases as it multiplies."""

    def __init__(self, products: CpuProducts) -> None:
        self._products = products

    def plan_texts(
        self, counts: Sequence[int], attended: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        return list(counts), list(attended)

    def mutual_attention(
        self,
        qkv: torch.Tensor,
        texts: Plan,
        head_dim: int,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        counts, attended = texts
        return mutual_attention(qkv, counts, head_dim, distance_bias, attended)

    def text_attention(self, qkv: BiasedLinear, head_dim: int) -> TextAttention:
        product = self.biased_linear(qkv)

        def attention(
            x: torch.Tensor, texts: Plan, distance_bias: torch.Tensor | None
        ) -> torch.Tensor:
            return self.mutual_attention(product(x), texts, head_dim, distance_bias)

        return attention

    def sum_norm(self, linears: Sequence[BiasedLinear], norm: LayerNormWeights) -> SumNorm:
        products = [*map(self.biased_linear, linears)]
        norm_bias = norm.bias
        assert norm_bias is not None

        def sum_norm(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            # Batches of rows whose intermediate results stay in the processor's cache.
            for start in range(0, len(x), TEXT_ROWS):
                rows = x[start : start + TEXT_ROWS]
                sums = residual[start : start + TEXT_ROWS]
                for product in products:
                    rows = product(rows)
                add_layer_norm(rows, sums, norm.weight, norm_bias, norm.eps)
            return residual

        return sum_norm

    def biased_linear(self, biased: BiasedLinear) -> Product:
        return self._products.biased(biased.linear, biased.bias, biased.activation)
