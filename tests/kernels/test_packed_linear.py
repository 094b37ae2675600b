"""Packed weights: the same product, wherever the packed bytes lie."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.cpu.packed_linear import (
    PackedLayout,
    can_pack,
    copy_packed,
    linear,
    pack,
    packed_view,
)

DTYPES = [
    pytest.param(
        dtype,
        id=str(dtype),
        marks=pytest.mark.skipif(not can_pack(dtype), reason="not on this CPU"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
SHAPES = [(96, 64), (257, 130), (960, 576), (512, 1536)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_plain_weight(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    x = torch.randn(33, shape[1]).to(dtype)
    expected = x.double() @ weight.double().T
    error = torch.dist(linear(x, pack(weight)).double(), expected) / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_bytes_may_lie_in_memory_of_somebody_else(dtype: torch.dtype) -> None:
    weight = torch.randn(257, 130).to(dtype)
    x = torch.randn(5, 130).to(dtype)
    layout = PackedLayout.of((257, 130), dtype)
    packed = pack(weight)
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    copy_packed(packed, memory)
    assert torch.equal(linear(x, packed_view(memory, layout)), linear(x, packed))


def test_a_plain_weight_is_multiplied_too() -> None:
    weight = torch.randn(20, 30)
    x = torch.randn(4, 30)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
