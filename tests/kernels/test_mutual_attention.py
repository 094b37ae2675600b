"""Attention of whole texts against its twin in float64."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.mutual_attention import (
    mutual_attention,
    mutual_attention_twin,
    text_tiles,
)
from headwater.kernels.cpu.encoders import mutual_attention as on_cpu
from headwater.kernels.cpu.encoders.mutual_attention import KEYS, QUERIES
from headwater.kernels.cpu.encoders.mutual_attention import (
    mutual_attention as mutual_attention_on_cpu,
)

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
    found = mutual_attention_on_cpu(qkv.to(dtype), COUNTS, 32, bias)
    expected = mutual_attention_twin(qkv.to(dtype).double(), COUNTS, 32, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_text_is_computed_in_parts_and_alone_as_in_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts = [5, QUERIES + KEYS + 30, 40]
    qkv = torch.randn(sum(counts), 3 * 2 * 16).to(dtype)
    bias = torch.randn(2, 2 * max(counts) - 1)
    found = mutual_attention_on_cpu(qkv, counts, 16, bias)
    expected = mutual_attention_twin(qkv.double(), counts, 16, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    parts = qkv.split(counts)
    alone = [
        mutual_attention_on_cpu(part, [count], 16, bias)
        for part, count in zip(parts, counts, strict=True)
    ]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.long  # compiles a kernel that this machine has no other use for
def test_a_machine_without_amx_multiplies_bfloat16_as_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_cpu, "has_amx", lambda: False)
    monkeypatch.setattr(on_cpu, "kernel", on_cpu.kernel.__wrapped__)
    qkv, bias = inputs(num_heads=3, head_dim=32)
    rounded = qkv.bfloat16()
    found = mutual_attention_on_cpu(rounded, COUNTS, 32, bias)
    expected = mutual_attention_on_cpu(rounded.float(), COUNTS, 32, bias)
    assert torch.equal(found, expected.bfloat16())


def test_a_bias_belongs_to_the_distance_from_query_to_key() -> None:
    # Scores are biases alone, so that each token reads the next one.
    qkv = torch.zeros(4, 3 * 16)
    qkv[:, 32:] = torch.arange(4.0)[:, None]
    bias = torch.full((1, 2 * 4 - 1), -1e4)
    bias[0, 3 + 1] = 0.0
    out = mutual_attention_twin(qkv, [4], 16, bias)[:, 0]
    assert out[:3].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("is_biased", [False, True], ids=["plain", "biased"])
def test_tokens_attend_to_the_first_ones_of_their_text_where_a_plan_says_so(
    is_biased: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    counts, attended = [3, 130, 65], [3, 70, 1]
    qkv = torch.randn(sum(counts), 3 * 2 * 24)
    bias = torch.randn(2, 2 * 140 - 1) if is_biased else None
    expected = mutual_attention_twin(qkv.double(), counts, 24, bias, attended)
    on_cpu = mutual_attention_on_cpu(qkv, counts, 24, bias, attended)
    torch.testing.assert_close(on_cpu.double(), expected, atol=1e-5, rtol=1e-5)
    sent = None if bias is None else bias.to(device)
    found = mutual_attention(qkv.to(device), text_tiles(counts, device, attended), 24, sent)
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 24), (torch.bfloat16, 32), (torch.float32, 256)]
)
def test_the_kernel_computes_a_text_as_the_twin_does_and_alone_as_in_company(
    dtype: torch.dtype, head_dim: int, is_biased: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    counts = [3, 130, 65]
    qkv = torch.randn(sum(counts), 3 * 2 * head_dim, device=device).to(dtype)
    bias = torch.randn(2, 2 * 140 - 1, device=device) if is_biased else None
    found = mutual_attention(qkv, text_tiles(counts, qkv.device), head_dim, bias)
    expected = mutual_attention_twin(qkv.double(), counts, head_dim, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    alone = mutual_attention(qkv[3:133].contiguous(), text_tiles([130], qkv.device), head_dim, bias)
    assert torch.equal(alone, found[3:133])


def test_a_bias_of_the_products_changes_queries_and_values_and_no_weight_of_keys(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    counts = [3, 130, 65]
    qkv = torch.randn(sum(counts), 3 * 2 * 24, device=device)
    bias = torch.randn(3 * 2 * 24, device=device)
    tiles = text_tiles(counts, qkv.device)
    found = mutual_attention(qkv, tiles, 24, None, bias)
    expected = mutual_attention_twin(qkv.double() + bias.double(), counts, 24)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
