"""Products over leaves: their values, and the bits that must not depend on rows, outputs, or the
leaves of a launch."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.gemm.gemm import configure_blas, linear, linear_silu_mul
from headwater.kernels.gemm.tree_gemm import (
    MANY_ROWS,
    TILES,
    TreeTiles,
    choose,
    tree_gemm,
    tree_gemm_twin,
)
from headwater.kernels.gemm.tree_sum import tree_sum
from headwater.kernels.sampling.lm_head_sample import MAX_ROWS, best_of_head
from headwater.kernels.sampling.sample import Candidates, Draws
from tests.kernels.paging import GPU, LONG_INTERPRETED, POISON, relative_error

ALL_TILES = [*TILES.values(), MANY_ROWS]
INPUT_DIVIDED = [(4096, 4096), (4096, 12288), (1024, 2048), (1024, 3072)]
"""[N, K] of `o` and `down` of Qwen3-8B and Qwen3-0.6B."""
OUTPUT_DIVIDED = [
    (6144, 4096),
    (24576, 4096),
    (151936, 4096),
    (4096, 1024),
    (6144, 1024),
    (151936, 1024),
]
"""[N, K] of `qkv`, `gate_up` and the head."""
ROWS = (1, 7, 64, 300)


def random(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_leaves: int,
    dtype: torch.dtype = torch.float32,
    tiles: TreeTiles | None = None,
) -> torch.Tensor:
    """Part of a wider matrix, so that writes beyond the product show."""
    m = x.shape[0]
    n = weight.shape[0]
    whole = torch.full((m + 1, n + 3), POISON, dtype=dtype, device=x.device)
    tree_gemm(x, weight, num_leaves, whole[:m, :n], tiles)
    assert bool((whole[m] == POISON).all())
    assert bool((whole[:, n:] == POISON).all())
    return whole[:m, :n]


def halves(x: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Parts of the inputs as ranks have them."""
    return [part.contiguous() for part in x.chunk(num_parts, 1)]


def whole_numbers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers whose products and sums are exact: the interpreter's order along K, which is numpy's,
    plays no part."""
    return torch.randint(-8, 9, shape, generator=generator, device=generator.device).bfloat16()


def leaves_apart(
    generator: torch.Generator, m: int, n: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight whose leaves have exact products of very different sizes: another order of
    addition rounds otherwise."""
    x = whole_numbers(generator, m, k)
    weight = whole_numbers(generator, n, k)
    exponents = torch.tensor([0, 21, 3, 24, -5, 19, 11, 23], device=x.device).repeat_interleave(
        k // 8
    )
    return x, torch.ldexp(weight.float(), exponents).bfloat16()


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize(
    "num_leaves", [*(pytest.param(n, marks=LONG_INTERPRETED) for n in (1, 2, 4)), 8]
)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(1, 40, 512, marks=LONG_INTERPRETED),
        (19, 35, 8 * 24),
        pytest.param(70, 130, 8 * 72, marks=LONG_INTERPRETED),
        pytest.param(300, 1024, 3072, marks=GPU),
    ],
)
def test_a_product_agrees_with_float64(
    m: int, n: int, k: int, num_leaves: int, tiles: TreeTiles, generator: torch.Generator
) -> None:
    x = random(generator, m, k)
    weight = random(generator, n, k)
    expected = tree_gemm_twin(x.double(), weight.double(), num_leaves)
    assert relative_error(product(x, weight, num_leaves, tiles=tiles), expected) < 1e-5
    assert relative_error(product(x, weight, num_leaves, torch.bfloat16, tiles), expected) < 3e-3


@pytest.mark.parametrize("k", [8 * 16, 8 * 128, 8 * 200])
@pytest.mark.parametrize("tiles", [ALL_TILES[0], MANY_ROWS], ids=str)
def test_leaves_are_added_in_a_tree(k: int, tiles: TreeTiles, generator: torch.Generator) -> None:
    x, weight = leaves_apart(generator, 5, 33, k)
    leaves = [
        some.float() @ those.float().t()
        for some, those in zip(halves(x, 8), halves(weight, 8), strict=True)
    ]
    assert torch.equal(product(x, weight, 8, tiles=tiles), tree_sum(leaves))
    # Another order has other bits, so that the test sees one.
    assert not torch.equal(sum(leaves[1:], leaves[0]), tree_sum(leaves))
    assert not torch.equal(tree_sum([*leaves[4:6], *leaves[:4], *leaves[6:]]), tree_sum(leaves))


@pytest.mark.parametrize("k", [8 * 16, 8 * 128])
@pytest.mark.parametrize(
    "num_parts",
    [pytest.param(2, marks=LONG_INTERPRETED), 4, pytest.param(8, marks=LONG_INTERPRETED)],
)
def test_parts_of_the_tree_are_those_of_fewer_leaves(
    k: int, num_parts: int, generator: torch.Generator
) -> None:
    x, weight = leaves_apart(generator, 7, 40, k)
    parts = [
        product(*each, 8 // num_parts)
        for each in zip(halves(x, num_parts), halves(weight, num_parts), strict=True)
    ]
    assert torch.equal(tree_sum(parts), product(x, weight, 8))
    assert torch.equal(tree_sum(parts).bfloat16(), product(x, weight, 8, torch.bfloat16))


def test_rows_and_outputs_alone_have_the_bits_of_all(generator: torch.Generator) -> None:
    x, weight = leaves_apart(generator, 70, 60, 8 * 40)
    whole = product(x, weight, 8)
    assert torch.equal(product(x[3:4], weight, 8), whole[3:4])
    assert torch.equal(product(x[20:50], weight[:30], 8), whole[20:50, :30])


def test_tiles_depend_on_rows_and_outputs_alone() -> None:
    assert choose(1, 1024) == choose(16, 2048) == TILES[16, True]
    assert choose(17, 4096) == choose(64, 4096) == TILES[64, False]
    assert choose(65, 1024) == choose(9000, 9000) == MANY_ROWS


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), INPUT_DIVIDED)
def test_bits_do_not_depend_on_rows_tiles_or_the_leaves_of_a_launch(
    n: int, k: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = random(generator, max(ROWS), k, dtype=dtype)
    weight = random(generator, n, k, dtype=dtype)
    whole = product(x, weight, 8)
    for tiles in ALL_TILES:
        assert torch.equal(product(x, weight, 8, tiles=tiles), whole), tiles
    for m in ROWS:
        assert torch.equal(product(x[-m:], weight, 8), whole[-m:]), m
        assert torch.equal(product(x[-m:], weight, 8, dtype), whole[-m:].to(dtype)), m
        for num_parts in (2, 4, 8):
            pieces = zip(halves(x[-m:], num_parts), halves(weight, num_parts), strict=True)
            parts = [product(*each, 8 // num_parts) for each in pieces]
            assert torch.equal(tree_sum(parts), whole[-m:]), (m, num_parts)
    in_order = [product(*each, 1) for each in zip(halves(x, 8), halves(weight, 8), strict=True)]
    assert not torch.equal(sum(in_order[1:], in_order[0]), whole)


@GPU
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), OUTPUT_DIVIDED)
def test_products_of_our_own_have_the_same_bits_for_any_number_of_outputs(
    n: int, k: int, num_parts: int, generator: torch.Generator
) -> None:
    configure_blas()
    x = random(generator, 2048, k)
    weight = random(generator, n, k)
    for m in (*ROWS, 8, 16, 17, 32, 33, 128, 192, 256, 513, 2048):
        whole = linear(x[:m], weight, is_own=True)
        parts = [linear(x[:m], part, is_own=True) for part in weight.chunk(num_parts)]
        assert torch.equal(torch.cat(parts, 1), whole), m


@GPU
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (3072, 1024)])
def test_gated_products_have_the_same_bits_for_any_number_of_outputs(
    n: int, k: int, num_parts: int, generator: torch.Generator
) -> None:
    configure_blas()
    x = random(generator, 2048, k)
    weight = random(generator, 2 * n, k) * k**-0.5
    gates, ups = (each.chunk(num_parts) for each in weight.chunk(2))
    for m in (*ROWS, 8, 9, 16, 17, 128, 192, 256, 513, 1024, 2048):
        whole = linear_silu_mul(x[:m], weight, is_own=True)
        parts = [
            linear_silu_mul(x[:m], torch.cat(each), is_own=True)
            for each in zip(gates, ups, strict=True)
        ]
        assert torch.equal(torch.cat(parts, 1), whole), m


@GPU
@pytest.mark.parametrize("num_parts", [2, 4])
def test_scores_of_a_part_of_the_head_are_those_of_the_whole(
    num_parts: int, generator: torch.Generator
) -> None:
    device = generator.device
    vocab_size = 151936
    hidden = random(generator, MAX_ROWS, 1024)
    head = random(generator, vocab_size, 1024)
    draws = Draws(
        temperatures=torch.tensor([0.0, 0.5, 1.0, 2.0], device=device).repeat(MAX_ROWS // 4),
        seeds=torch.arange(MAX_ROWS, device=device),
        choice_indices=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
        output_indices=torch.arange(MAX_ROWS, dtype=torch.int32, device=device),
    )

    def best(part: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        candidates = Candidates.allocate(MAX_ROWS, vocab_size, device)
        num = best_of_head(hidden, part, draws, candidates, first)
        scores, places = candidates.scores[:, :num].max(1)
        return scores, candidates.ids[:, :num].gather(1, places[:, None])[:, 0]

    size = vocab_size // num_parts // 64 * 64
    firsts = [i * size for i in range(num_parts)]
    parts = [
        best(head[first : first + size if first != firsts[-1] else vocab_size], first)
        for first in firsts
    ]
    scores, winner = torch.stack([each[0] for each in parts]).max(0)
    ids = torch.stack([each[1] for each in parts]).gather(0, winner[None])[0]
    expected = best(head, 0)
    assert torch.equal(scores, expected[0])
    assert torch.equal(ids, expected[1])
