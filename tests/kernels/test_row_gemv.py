from __future__ import annotations

import pytest
import torch

from headwater.kernels import row_gemv
from headwater.kernels.row_gemv import (
    TILES,
    RowTiles,
    gemv_add,
    gemv_twin,
    norm_gemv,
    norm_gemv_silu_mul,
    norm_gemv_silu_mul_twin,
    norm_gemv_twin,
)
from tests.kernels.paging import GPU, POISON, relative_error

SHAPES = [(70, 64), (37, 576), (16, 1536), (5, 3072)]
"""[N, K]"""
GPU_SHAPES = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072),
    (962, 576), (577, 1536), (4093, 11008), (129, 28672),
]  # fmt: skip
BOUND = 4e-3
"""Rounding to bfloat16 costs at most 3.9e-3, 1.7e-3 as a rule; float32 sums add 1e-6."""


def given(n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row, a norm's weight and a weight."""
    device = generator.device
    x, weight = (torch.randn(*s, generator=generator, device=device).bfloat16() for s in ((k,), (n, k)))
    return x * 3, torch.rand(k, generator=generator, device=device).bfloat16(), weight


@pytest.mark.parametrize(("n", "k"), [*SHAPES, *(pytest.param(*shape, marks=GPU) for shape in GPU_SHAPES)])
def test_products_of_one_row_agree_with_float64(n: int, k: int, generator: torch.Generator) -> None:
    x, norm, weight = given(n, k, generator)
    bias = torch.randn(n, generator=generator, device=generator.device).bfloat16()
    out = x.new_full((n,), POISON)
    norm_gemv(x, norm, 1e-6, weight, out)
    expected = norm_gemv_twin(x.double(), norm.double(), 1e-6, weight.double())
    assert relative_error(out, expected) < BOUND
    norm_gemv(x, norm, 1e-6, weight, out, bias=bias)
    assert relative_error(out, expected + bias) < BOUND
    residual = torch.randn(n, generator=generator, device=generator.device).bfloat16()
    expected = residual.double() + gemv_twin(x.double(), weight.double())
    gemv_add(x, weight, residual)
    assert relative_error(residual, expected) < BOUND


@pytest.mark.parametrize(("n", "k"), [*SHAPES, *(pytest.param(*shape, marks=GPU) for shape in GPU_SHAPES)])
def test_gates_and_what_they_gate_meet(n: int, k: int, generator: torch.Generator) -> None:
    x, norm, weight = given(2 * n, k, generator)
    # Gates of a size at which SiLU is neither zero nor straight.
    weight = weight * k**-0.5
    out = x.new_full((n,), POISON)
    norm_gemv_silu_mul(x, norm, 1e-6, weight, out)
    twin = norm_gemv_silu_mul_twin(x.double(), norm.double(), 1e-6, weight.double())
    assert relative_error(out, twin) < BOUND


@pytest.mark.parametrize("tiles", list(dict.fromkeys(TILES.values())), ids=str)
def test_all_tiles_give_the_product(
    tiles: RowTiles, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_gemv, "choose", lambda k, *, is_gated: tiles)
    n, k = 37, tiles.num_early * tiles.block_k + 40
    x, norm, weight = given(n, k, generator)
    out = x.new_full((n,), POISON)
    norm_gemv(x, norm, 1e-6, weight, out)
    assert relative_error(out, norm_gemv_twin(x.double(), norm.double(), 1e-6, weight.double())) < BOUND
