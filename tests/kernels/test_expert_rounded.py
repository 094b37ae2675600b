from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts.round_rows import round_rows
from headwater.kernels.experts.rounded_product import (
    choose,
    rounded_expert_product,
    rounded_expert_product_twin,
)
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.gemm.w8a8 import W8A8Weight
from headwater.kernels.quant.token_rounding import Rounding, round_tokens
from tests.kernels.paging import GPU, relative_error
from tests.kernels.test_w8a8 import BLOCKS, FP8, INT8, ROUNDINGS, made, rows_of


def of_experts(
    rounding: Rounding, num_experts: int, n: int, k: int, generator: torch.Generator
) -> W8A8Weight:
    """[E N, K] whose products are of the size of their inputs."""
    weight = made(rounding, num_experts * n, k, generator)
    return W8A8Weight(values=weight.values, scales=weight.scales * 100 * k**-0.5)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_tokens_are_rounded_to_the_rows_of_their_experts(
    rounding: Rounding, generator: torch.Generator
) -> None:
    x = rows_of(5, 640, generator)
    places = torch.tensor([7, 0, 3, -1, 5, 1, 2, 9, 8, 6], dtype=torch.int32, device=x.device)
    values, scales = round_rows(x, rounding, places, 11)
    expected, expected_scales = round_tokens(x, rounding)
    for pair, row in enumerate(places.tolist()):
        if row >= 0:
            own = values[row].view(torch.uint8), scales[..., row]
            alone = expected[pair // 2].view(torch.uint8), expected_scales[..., pair // 2]
            assert all(torch.equal(*each) for each in zip(own, alone, strict=True))


def test_more_rows_an_expert_have_larger_tiles(generator: torch.Generator) -> None:
    tiles = [choose(8 * count, 128) for count in (1, 64, 65, 1024, 1025)]
    assert [each and each.block_m for each in tiles] == [8, 8, 16, 64, None]


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
def test_the_twin_is_near_what_is_not_rounded(
    rounding: Rounding, generator: torch.Generator
) -> None:
    gate_up = of_experts(rounding, 4, 256, 128, generator)
    down = of_experts(rounding, 4, 128, 128, generator)
    x = torch.randn(6, 128, generator=generator, device=generator.device).bfloat16()
    experts = torch.tensor([[i % 4, (i + 1) % 4] for i in range(6)], device=x.device)
    weights = torch.rand(6, 2, generator=generator, device=x.device)
    found = rounded_expert_product_twin(x, experts, weights, gate_up, down, 4)

    def of(weight: W8A8Weight) -> torch.Tensor:
        scales = weight.scales.double()
        if scales.ndim == 2:
            scales = scales.repeat_interleave(64, dim=0).repeat_interleave(128, dim=1)
        else:
            scales = scales[:, None]
        return (weight.values.double() * scales).view(4, -1, 128)

    expected = torch.zeros_like(found, dtype=torch.float64)
    for token, chosen in enumerate(experts.tolist()):
        for place, expert in enumerate(chosen):
            gate, up = (of(gate_up)[expert] @ x[token].double()).chunk(2)
            made = of(down)[expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += weights[token, place].double() * made
    assert relative_error(found, expected) < 0.08


@GPU
@pytest.mark.parametrize("rounding", [FP8, INT8, BLOCKS], ids=str)
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "num_chosen"), [(2048, 768, 128, 8), (1024, 640, 24, 3)]
)
def test_a_token_has_the_same_bits_beside_any_others(
    rounding: Rounding,
    hidden: int,
    inner: int,
    num_experts: int,
    num_chosen: int,
    generator: torch.Generator,
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    device = generator.device
    gate_up = of_experts(rounding, num_experts, 2 * inner, hidden, generator)
    down = of_experts(rounding, num_experts, hidden, inner, generator)
    most = 2500
    logits = torch.randn(most, num_experts, generator=generator, device=device)
    # One expert has a row of every seventh token, and some have none.
    logits[::7, 0] += 100
    logits[:, num_experts // 2 : num_experts // 2 + 4] -= 100
    experts, weights = route(logits, Choice(num_chosen=num_chosen, is_normalized=True))
    x = torch.randn(most, hidden, generator=generator, device=device).bfloat16()
    operands = gate_up, down, num_experts
    whole = rounded_expert_product(x, experts, weights, *operands)
    assert bool(whole.isfinite().all())
    few = slice(0, 40)
    twin = rounded_expert_product_twin(x[few], experts[few].long(), weights[few], *operands)
    assert relative_error(whole[few], twin.double()) < 0.01
    for count in (*range(1, 65), 77, 129, 200, 257, 511, 700, 1023, 1025, 1500):
        for dependent in (False, True):
            own = x[:count], experts[:count], weights[:count]
            out = rounded_expert_product(*own, *operands, dependent=dependent)
            assert torch.equal(out, whole[:count]), (count, dependent)
