from __future__ import annotations

import itertools

import pytest
import torch

from headwater.kernels.quant.int4_layout import (
    MIDDLE,
    MOST_SCALE,
    Int4Weight,
    expand,
    pack,
    unpack,
    without_zeros,
    zero_points,
)


def random_weight(
    n: int,
    k: int,
    num_groups: int,
    generator: torch.Generator,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights uint8 [N, K], scales and zeros [groups, N]."""
    weights = torch.randint(
        0, 16, (n, k), dtype=torch.uint8, generator=generator, device=generator.device
    )
    scales = torch.rand(num_groups, n, generator=generator, device=generator.device) * 0.02 + 1e-4
    zeros = torch.randint(
        0, 17, (num_groups, n), dtype=torch.uint8, generator=generator, device=generator.device
    )
    return weights, scales.to(scale_dtype), zeros


@pytest.mark.parametrize(("k", "num_blocks"), [(96, 1), (192, 2), (256, 4)])
def test_a_word_holds_the_inputs_that_its_definition_names(
    k: int, num_blocks: int, generator: torch.Generator
) -> None:
    weights, _, _ = random_weight(3, k, 1, generator)
    words = pack(weights)
    assert words.shape == (3, k // 8)
    tiles = range(k // (32 * num_blocks))
    for n, tile, c, block, e, p in itertools.product(
        range(3), tiles, range(4), range(num_blocks), range(2), range(4)
    ):
        word = int(words[n, (4 * tile + c) * num_blocks + block]) & 0xFFFFFFFF
        held = int(weights[n, 32 * (num_blocks * tile + block) + 8 * p + 2 * c + e])
        assert word >> 4 * (4 * e + p) & 15 == held
    assert torch.equal(unpack(words), weights)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_weight_is_what_float64_makes_of_it_rounded_once(
    dtype: torch.dtype, scale_dtype: torch.dtype, is_ordered: bool, generator: torch.Generator
) -> None:
    weights, scales, zeros = random_weight(1030, 128, 4, generator, scale_dtype)
    in_order = torch.arange(128, device=generator.device) // 32
    of_inputs = (
        in_order
        if is_ordered
        else in_order[torch.randperm(128, generator=generator, device=generator.device)]
    )
    exact = (weights.double() - zeros.t().double()[:, of_inputs]) * scales.t().double()[
        :, of_inputs
    ]
    groups = None if is_ordered else of_inputs.int()
    weight = Int4Weight(words=pack(weights), scales=scales, zeros=zeros, groups=groups)
    assert torch.equal(expand(weight, dtype), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_symmetric_weights_are_the_same_without_zero_points(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    weights, scales, zeros = random_weight(5, 64, 2, generator)
    whole = Int4Weight(words=pack(weights), scales=scales, zeros=torch.full_like(zeros, MIDDLE))
    bare = without_zeros(whole)
    assert bare.zeros is None
    assert without_zeros(bare) is bare
    assert torch.equal(zero_points(bare), zero_points(whole))
    assert torch.equal(expand(bare, dtype), expand(whole, dtype))


def test_zero_points_stay_where_one_differs_or_a_scale_is_too_large(
    generator: torch.Generator,
) -> None:
    weights, scales, zeros = random_weight(5, 64, 2, generator)
    middle = torch.full_like(zeros, MIDDLE)
    other = middle.clone()
    large = scales.clone()
    other[1, 3] += 1
    large[0, 2] = -MOST_SCALE
    for each in (
        Int4Weight(words=pack(weights), scales=scales, zeros=other),
        Int4Weight(words=pack(weights), scales=large, zeros=middle),
    ):
        assert without_zeros(each) is each
