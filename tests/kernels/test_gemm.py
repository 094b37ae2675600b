from __future__ import annotations

import pytest
import torch

from headwater.kernels.gated_gemm import gated_gemm
from headwater.kernels.gemm import (
    TILES,
    Tiles,
    configure_blas,
    linear,
    linear_silu_mul,
    linear_twin,
    skinny_gated_gemm,
    skinny_gemm,
)
from headwater.kernels.silu_mul import silu_mul, silu_mul_twin
from tests.kernels.paging import GPU, POISON, relative_error

ALL_TILES = list(TILES.values())
LINEARS = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
]  # fmt: skip
"""[N, K] of the products of Qwen3-8B and Qwen3-0.6B."""


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 96, 256), (3, 70, 576), (13, 64, 100), pytest.param(61, 4100, 4096, marks=GPU)]
)
def test_skinny_gemm_agrees_with_float64(m: int, n: int, k: int, tiles: Tiles, generator: torch.Generator) -> None:
    x, weight = (torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (m, n))
    out = x.new_full((m, n), POISON)
    skinny_gemm(x, weight, out, tiles)
    assert relative_error(out, linear_twin(x.double(), weight.double())) < 3e-3


@GPU
@pytest.mark.parametrize(("n", "k"), LINEARS)
def test_every_batch_size_gives_a_row_the_same_bits(n: int, k: int, generator: torch.Generator) -> None:
    configure_blas()
    weight = torch.randn(n, k, generator=generator, device=generator.device).bfloat16()
    x = torch.randn(2048, k, generator=generator, device=generator.device).bfloat16()
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(8)])
    for m in (2, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 128, 129, 255, 256, 300, 512, 1000, 2048):
        at = {0, 1, m // 2, m - 1}
        rolled = x[:m].clone()
        for i, place in enumerate(at):
            rolled[place] = x[i]
        out = linear(rolled, weight)
        assert all(torch.equal(out[place], alone[i]) for i, place in enumerate(at)), m


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 256), (13, 64, 100), pytest.param(16, 4096, 4096, marks=GPU)])
def test_skinny_gated_gemm_agrees_with_float64(m: int, n: int, k: int, generator: torch.Generator) -> None:
    x, weight = (torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (m, 2 * n))
    out = x.new_full((m, n), POISON)
    skinny_gated_gemm(x, weight * k**-0.5, out)
    # The product is rounded before it is gated, as one that is stored.
    assert relative_error(out, silu_mul_twin(linear_twin(x.double(), (weight * k**-0.5).double()))) < 6e-3


@pytest.mark.parametrize(("m", "n", "k"), [(300, 256, 128), pytest.param(8192, 12288, 4096, marks=GPU)])
def test_gated_gemm_agrees_with_float64(m: int, n: int, k: int, generator: torch.Generator) -> None:
    x, weight = (torch.randn(s, k, generator=generator, device=generator.device).bfloat16() for s in (m, 2 * n))
    out = x.new_full((m, n), POISON)
    gated_gemm(x, weight * k**-0.5, out)
    product = linear_twin(x.double(), (weight * k**-0.5).double())
    assert relative_error(out, silu_mul_twin(product)) < 6e-3


@GPU
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (3072, 1024)])
def test_a_row_is_gated_to_the_same_bits_in_every_batch(n: int, k: int, generator: torch.Generator) -> None:
    configure_blas()
    weight = torch.randn(2 * n, k, generator=generator, device=generator.device).bfloat16() * k**-0.5
    x = torch.randn(3000, k, generator=generator, device=generator.device).bfloat16()
    together = silu_mul(linear(x, weight))
    for m in (1, 2, 8, 16, 17, 64, 1024, 1500, 2048, 3000):
        assert torch.equal(linear_silu_mul(x[:m], weight), together[:m]), m
