"""The norm of a token and the choice of its experts in one launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts.normed_routes import NormedRouter, normed_routes
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.gemm.gemm import configure_blas, linear
from headwater.kernels.norm.rms_norm import add_rms_norm
from tests.kernels.paging import GPU

CHOICES = {
    "softmax": Choice(num_chosen=8, is_normalized=True),
    "not normalized": Choice(num_chosen=3),
    "sigmoid": Choice(num_chosen=6, is_sigmoid=True, is_normalized=True, scale=2.5),
    "a rank's": Choice(num_chosen=8, own=range(8, 24)),
}


def random_router(
    num_experts: int, hidden: int, choice: Choice, generator: torch.Generator, *, has_more: bool
) -> NormedRouter:
    device = generator.device

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return NormedRouter(
        # Factors of norms with an offset are float32.
        norm=randn(hidden) if has_more else randn(hidden).bfloat16(),
        eps=1e-6,
        weight=(randn(num_experts, hidden) * hidden**-0.5).bfloat16(),
        choice=choice,
        correction=randn(num_experts) if has_more else None,
        bias=randn(num_experts).bfloat16() if has_more else None,
        counts=torch.zeros(num_experts, dtype=torch.int64, device=device),
        num_done=torch.zeros(1, dtype=torch.int32, device=device),
    )


@GPU
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("num_experts", "hidden"), [(128, 2048), (256, 2048), (32, 2880)])
def test_a_token_has_the_bits_of_three_launches(
    num_experts: int, hidden: int, name: str, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    configure_blas()
    for has_more in (False, True):
        router = random_router(num_experts, hidden, CHOICES[name], generator, has_more=has_more)
        shape = 24, hidden
        xs, sums = (
            torch.randn(shape, generator=generator, device=generator.device).bfloat16()
            for _ in range(2)
        )
        for x, residual in zip(xs.split(1), sums.split(1), strict=True):
            together = residual.clone()
            found = normed_routes(x, together, router, dependent=True)
            apart = residual.clone()
            normed = add_rms_norm(x, apart, router.norm, router.eps)
            logits = linear(normed, router.weight)
            routes = route(logits, router.choice, router.correction, router.bias)
            assert torch.equal(together, apart)
            for a, b in zip(found, (normed, *routes), strict=True):
                assert torch.equal(a, b)
        assert router.counts is not None
        assert int(router.counts.sum()) == len(xs) * router.choice.num_chosen
        assert not router.num_done.any()


def test_what_no_program_holds_is_not_served(generator: torch.Generator) -> None:
    plain = random_router(64, 2048, CHOICES["softmax"], generator, has_more=False)
    assert plain.is_served == is_hopper(generator.device)
    for other in (
        replace(plain, norm=plain.norm.half()),
        replace(plain, weight=plain.weight[:48]),
        replace(plain, choice=Choice(num_chosen=4, num_groups=4, num_chosen_groups=2)),
        random_router(64, 4096, CHOICES["softmax"], generator, has_more=False),
    ):
        assert not other.is_served
