"""Operations of encoders on an NVIDIA GPU."""

from __future__ import annotations

import torch

from headwater.kernels.attention.mutual_attention import mutual_attention, text_tiles
from headwater.kernels.gemm.add_bias import add_bias
from headwater.kernels.norm.activation import ACTIVATIONS

from ...layers.linear.linear import Linear, Product
from ...layers.text_batch import TextBatch
from ..cuda_products import CudaProducts


class CudaTexts:
    """See `EncoderPlatform`."""

    device: torch.device
    products: CudaProducts

    def plan_texts(self, batch: TextBatch) -> torch.Tensor:
        return text_tiles(batch.counts.tolist(), self.device)

    def mutual_attention(
        self,
        qkv: torch.Tensor,
        texts: torch.Tensor,
        head_dim: int,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return mutual_attention(qkv, texts, head_dim, distance_bias)

    def biased_linear(self, linear: Linear, bias: torch.Tensor, activation: str) -> Product:
        unbiased = self.products.of(linear)
        has_gelu = activation == "gelu"
        after = None if has_gelu or not activation else ACTIVATIONS[activation]

        def product(x: torch.Tensor) -> torch.Tensor:
            out = unbiased(x)
            add_bias(out, bias, has_gelu=has_gelu)
            return out if after is None else after(out)

        return product
