"""Operations of encoders on a CPU."""

from __future__ import annotations

import torch

from headwater.kernels.cpu.mutual_attention import mutual_attention

from ...layers.linear.linear import Linear, Product
from ...layers.platform import LayerNormWeights, SumNorm, TextAttention
from ...layers.text_batch import TextBatch
from ..cpu_products import CpuProducts


class CpuTexts:
    """See `EncoderPlatform`. The library adds biases as it multiplies."""

    def __init__(self, products: CpuProducts) -> None:
        self._products = products

    def plan_texts(self, batch: TextBatch) -> list[int]:
        counts: list[int] = batch.counts.tolist()
        return counts

    def mutual_attention(
        self,
        qkv: torch.Tensor,
        texts: list[int],
        head_dim: int,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return mutual_attention(qkv, texts, head_dim, distance_bias)

    def text_attention(self, qkv: Linear, bias: torch.Tensor, head_dim: int) -> TextAttention:
        product = self.biased_linear(qkv, bias, "")

        def attention(
            x: torch.Tensor, texts: list[int], distance_bias: torch.Tensor | None
        ) -> torch.Tensor:
            return mutual_attention(product(x), texts, head_dim, distance_bias)

        return attention

    def sum_norm(self, linear: Linear, bias: torch.Tensor, norm: LayerNormWeights) -> SumNorm:
        product = self.biased_linear(linear, bias, "")

        def sum_norm(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return norm.add(product(x), residual)

        return sum_norm

    def biased_linear(self, linear: Linear, bias: torch.Tensor, activation: str) -> Product:
        return self._products.biased(linear, bias, activation)
