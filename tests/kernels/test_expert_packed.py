from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts.clamped_gate import ExpertBiases
from headwater.kernels.experts.expert_product import expert_product
from headwater.kernels.experts.packed_product import (
    choose,
    expanded,
    fits,
    packed_expert_product,
)
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.quant.mxfp4 import num_words
from tests.kernels.paging import GPU

KINDS = {
    "int4": (4, 128, True),
    "int4, symmetric": (4, 32, False),
    "int8": (8, 128, True),
    "fp8 in blocks": (8, 128, False),
    "fp8": (8, 0, False),
}
"""Bits, inputs of a group (0: all), and whether there are zero points."""


def random_words(kind: str, n: int, k: int, generator: torch.Generator) -> PackedWords:
    bits, group_size, has_zeros = KINDS[kind]
    device = generator.device
    groups = k // (group_size or k)

    def integers(least: int, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(least, most, shape, generator=generator, device=device)

    words = integers(-(1 << 31), 1 << 31, n, k * bits // 32).int()
    if bits == 8 and not has_zeros:
        # Bytes of e4m3 that are numbers.
        words &= 0x77777777
    scales = (torch.rand(groups, n, generator=generator, device=device) + 0.1) * k**-0.5
    scales *= 0.2 if bits == 4 else 0.01
    is_fp8 = bits == 8 and not has_zeros
    return PackedWords(
        words=words,
        scales=scales if is_fp8 else scales.half(),
        zeros=integers(0, 1 << bits, groups, n).to(torch.uint8) if has_zeros else None,
        bits=bits,
    )


def test_outputs_of_an_expert_are_whole_in_what_the_copy_engine_reads(
    generator: torch.Generator,
) -> None:
    weight = random_words("fp8", 6 * 48, 128, generator)
    assert fits(weight, 6)
    assert not fits(weight, 4)


@GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "num_chosen"), [(2048, 768, 128, 8), (1024, 640, 24, 3)]
)
def test_packed_experts_have_the_bits_of_expanded_ones(
    kind: str,
    hidden: int,
    inner: int,
    num_experts: int,
    num_chosen: int,
    generator: torch.Generator,
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    gate_up = random_words(kind, num_experts * 2 * inner, hidden, generator)
    down = random_words(kind, num_experts * hidden, inner, generator)
    matrices = [expanded(each, num_experts, torch.bfloat16) for each in (gate_up, down)]
    for count in (1, 2, 5, 16, 33, 64, 200, 700, 1500, 2500):
        shape = (count, num_experts)
        logits = torch.randn(shape, generator=generator, device=generator.device)
        experts, weights = route(logits, Choice(num_chosen=num_chosen, is_normalized=True))
        x = torch.randn(count, hidden, generator=generator, device=generator.device).bfloat16()
        expected = expert_product(x, experts, weights, *matrices)
        assert bool(expected.isfinite().all())
        out = packed_expert_product(
            x, experts, weights, gate_up, down, num_experts, dependent=count <= 64
        )
        assert torch.equal(out, expected), count


@pytest.mark.parametrize("k", [32, 64, 96, 160, 2880])
def test_inputs_in_mxfp4_need_not_be_whole_tiles(k: int, generator: torch.Generator) -> None:
    weight = random_floats(4 * 48, k, generator)
    assert weight.num_inputs == k
    assert weight.group_size == 32
    assert fits(weight, 4)
    assert not fits(weight, 8)


def test_many_rows_in_mxfp4_have_tiles_of_two_teams(generator: torch.Generator) -> None:
    weight = random_floats(32 * 16, 64, generator)
    tiles = [choose(4 * count, 32, weight) for count in (1, 32, 64, 128, 129, 512, 513)]
    assert [each.block_m for each in tiles] == [8, 8, 16, 32, 64, 64, 128]
    assert [each.block_n for each in tiles] == [64, 64, 64, 64, 128, 128, 128]


@GPU
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "num_chosen"),
    [(2880, 2880, 32, 4), (64, 96, 8, 3), (1024, 160, 24, 2)],
)
def test_experts_in_mxfp4_have_the_bits_of_expanded_ones(
    hidden: int, inner: int, num_experts: int, num_chosen: int, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    device = generator.device
    gate_up = random_floats(num_experts * 2 * inner, hidden, generator)
    down = random_floats(num_experts * hidden, inner, generator)
    matrices = [expanded(each, num_experts, torch.bfloat16) for each in (gate_up, down)]
    sizes = (num_experts, 2 * inner), (num_experts, hidden)
    of_products = (torch.randn(size, generator=generator, device=device) for size in sizes)
    biases = ExpertBiases(*(each.bfloat16() for each in of_products))
    for count in (*range(1, 65), 77, 129, 257, 511, 700, 1023, 1025, 2000, 2500):
        shape = (count, num_experts)
        logits = torch.randn(shape, generator=generator, device=device)
        if count % 5 == 0:
            # One expert has a row of every token, and most have none.
            logits[:, num_experts // 2 :] -= 100
            logits[:, 0] += 100
        experts, weights = route(logits, Choice(num_chosen=num_chosen, is_normalized=True))
        x = torch.randn(count, hidden, generator=generator, device=device).bfloat16()
        expected = expert_product(x, experts, weights, *matrices, biases=biases)
        assert bool(expected.isfinite().all())
        out = packed_expert_product(
            x, experts, weights, gate_up, down, num_experts, biases=biases, dependent=count <= 64
        )
        assert torch.equal(out, expected), count


def random_floats(n: int, k: int, generator: torch.Generator) -> PackedWords:
    device = generator.device
    shape = n, num_words(k)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, device=device).int()
    scales = torch.randint(116, 122, (k // 32, n), generator=generator, device=device)
    return PackedWords(words=words, scales=scales.to(torch.uint8), zeros=None, bits=4)
