"""Products of few tokens with their experts and a shared one, in two launches."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.experts.expert_product import few_product
from headwater.kernels.experts.gated_sum import gated_sum
from headwater.kernels.experts.shared_expert import SharedExpert
from headwater.kernels.gemm.gemm import linear, linear_silu_mul
from tests.kernels.paging import GPU
from tests.kernels.test_expert_product import QWEN, Mixture

SMALL = (128, 64, 6, 2)


@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize(
    ("count", "shape"),
    [
        pytest.param(1, SMALL, id="one token"),
        pytest.param(3, SMALL, id="three tokens"),
        *(pytest.param(count, QWEN, marks=GPU, id=f"{count} tokens") for count in (1, 3, 4)),
        pytest.param(1, (1024, 512, 16, 6), marks=GPU, id="six experts"),
        pytest.param(1, (256, 128, 4, 1), marks=GPU, id="one expert"),
    ],
)
def test_a_shared_expert_has_the_bits_of_launches_apart(
    count: int, shape: tuple[int, int, int, int], has_gate: bool, generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    hidden, inner = shape[:2]
    x = mixture.tokens(count)
    routes = mixture.routes(count)

    def randn(*sizes: int) -> torch.Tensor:
        values = torch.randn(sizes, generator=generator, device=x.device)
        return (values * sizes[-1] ** -0.5).bfloat16()

    gate = randn(1, hidden) if has_gate else None
    shared = SharedExpert(randn(2 * inner, hidden), randn(hidden, inner), gate)
    out = few_product(x, *routes, mixture.gate_up, mixture.down, shared=shared)
    added = linear(linear_silu_mul(x, shared.gate_up), shared.down)
    others = mixture.product(x, *routes)
    expected = others + added if gate is None else gated_sum(others, added, x, gate)
    assert torch.equal(out, expected)
