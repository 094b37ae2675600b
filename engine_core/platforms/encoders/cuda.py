"""Operations of encoders on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.kernels.attention.mutual_attention import mutual_attention, text_tiles
from headwater.kernels.gemm.add_bias import add_bias
from headwater.kernels.norm.activation import ACTIVATIONS
from headwater.kernels.norm.add_layer_norm import add_layer_norm
from headwater.kernels.norm.span_means import span_means

from ...layers.linear.linear import Product
from ...layers.platform import BiasedLinear, LayerNormWeights, SumNorm, TextAttention
from ..cuda_products import CudaProducts


class CudaTexts:
    """See `EncoderPlatform`. Biases are added by what reads a product next."""

    device: torch.device
    products: CudaProducts

    def plan_texts(self, counts: Sequence[int], attended: Sequence[int] = ()) -> torch.Tensor:
        return text_tiles(counts, self.device, attended)

    def mutual_attention(
        self,
        qkv: torch.Tensor,
        texts: torch.Tensor,
        head_dim: int,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return mutual_attention(qkv, texts, head_dim, distance_bias)

    def span_means(self, states: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
        return span_means(states, spans)

    def text_attention(self, qkv: BiasedLinear, head_dim: int) -> TextAttention:
        product = self.products.of(qkv.linear)

        def attention(
            x: torch.Tensor, texts: torch.Tensor, distance_bias: torch.Tensor | None
        ) -> torch.Tensor:
            return mutual_attention(product(x), texts, head_dim, distance_bias, qkv.bias)

        return attention

    def sum_norm(self, linears: Sequence[BiasedLinear], norm: LayerNormWeights) -> SumNorm:
        *before, last = linears
        products = [*map(self.biased_linear, before), self.products.of(last.linear)]
        norm_bias = norm.bias
        assert norm_bias is not None

        def sum_norm(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            for product in products:
                x = product(x)
            return add_layer_norm(x, last.bias, residual, norm.weight, norm_bias, norm.eps)

        return sum_norm

    def biased_linear(self, biased: BiasedLinear) -> Product:
        activation = biased.activation
        has_gelu = activation == "gelu"
        unbiased = self.products.of(biased.linear)
        after = None if has_gelu or not activation else ACTIVATIONS[activation]

        def product(x: torch.Tensor) -> torch.Tensor:
            out = unbiased(x)
            add_bias(out, biased.bias, has_gelu=has_gelu)
            return out if after is None else after(out)

        return product
