"""Attention of whole texts against its twin in float64."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.mutual_attention import mutual_attention_twin
from headwater.kernels.cpu.mutual_attention import mutual_attention

COUNTS = [1, 2, 17, 64, 33]


def inputs(num_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    qkv = torch.randn(sum(COUNTS), 3 * num_heads * head_dim)
    # Of texts of up to 80 tokens.
    return qkv, torch.randn(num_heads, 2 * 80 - 1)


@pytest.mark.parametrize("is_biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_texts_attend_to_themselves_alone_as_the_twin_says(
    dtype: torch.dtype, is_biased: bool
) -> None:
    qkv, biases = inputs(num_heads=3, head_dim=32)
    bias = biases if is_biased else None
    found = mutual_attention(qkv.to(dtype), COUNTS, 32, bias)
    expected = mutual_attention_twin(qkv.to(dtype).double(), COUNTS, 32, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_bias_belongs_to_the_distance_from_query_to_key() -> None:
    # Scores are biases alone, so that each token reads the next one.
    qkv = torch.zeros(4, 3 * 16)
    qkv[:, 32:] = torch.arange(4.0)[:, None]
    bias = torch.full((1, 2 * 4 - 1), -1e4)
    bias[0, 3 + 1] = 0.0
    out = mutual_attention_twin(qkv, [4], 16, bias)[:, 0]
    assert out[:3].tolist() == [1.0, 2.0, 3.0]
