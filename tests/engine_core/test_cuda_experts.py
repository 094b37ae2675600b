"""Packed weights of experts: in the order of a GPU's kernels, and multiplied there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.conformance.subject import Subject
from headwater.engine_core.devices import cuda
from headwater.engine_core.layers.experts import Experts, SharedExpert
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.fp8 import Fp8Linear
from headwater.engine_core.layers.linear.int4 import Int4Linear
from headwater.engine_core.layers.linear.int8 import Int8Linear
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.layers.linear.ordered import order_linears
from headwater.engine_core.layers.mlp import Mlp
from headwater.engine_core.layers.norm import RMSNorm
from headwater.engine_core.layers.process_group import Alone
from headwater.engine_core.layers.routing import ExpertStack, Router
from headwater.engine_core.weights.rounding import ROUNDINGS
from tests.engine_core.small_models import convert, random_checkpoint
from tests.engine_core.test_experts import check_a_thousand

NUM_EXPERTS = 4
KINDS: dict[str, Any] = {"int4": Int4Linear, "int8": Int8Linear, "fp8": Fp8Linear}


def packed(kind: str, n: int, k: int, device: torch.device) -> ExpertStack:
    """Random weights of all experts, as a GPU multiplies them."""
    made = ROUNDINGS[kind](torch.randn(NUM_EXPERTS * n, k) * k**-0.5)
    on_device = replace(
        made,
        **{
            name: getattr(made, name).to(device)
            for name in made.__slots__
            if isinstance(getattr(made, name), torch.Tensor)
        },
    )
    stack = ExpertStack(KINDS[kind](on_device, torch.bfloat16), NUM_EXPERTS)
    weights = Weights(linears={}, tensors={}, experts={"down": stack})
    return order_linears(weights, rounds_tokens=False).experts["down"]


def expanded(stack: ExpertStack, device: torch.device) -> torch.Tensor:
    """[E N, K]"""
    ones = torch.eye(stack.in_features, dtype=torch.bfloat16, device=device)
    return stack.linear.product(ones).t().contiguous()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_of_eight_bits_are_put_in_order(kind: str) -> None:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    stack = packed(kind, 16, 128, cpu)
    assert stack.kind == "ordered"
    torch.manual_seed(0)
    weight = torch.randn(NUM_EXPERTS * 16, 128) * 128**-0.5
    error = (expanded(stack, cpu).float() - weight).norm() / weight.norm()
    assert float(error) < 0.05


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-moe", "minimax-m2", "glm4-moe"])
def test_a_thousand_prompts_have_one_answer_each_on_a_gpu(family: str, tmp_path: Path) -> None:
    random_checkpoint(family, tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    check_a_thousand(folder, device="cuda", block_size=64, num_blocks=1200)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_multiplies_packed_experts_as_their_matrices(kind: str) -> None:
    device = torch.device("cuda")
    platform = Subject(cuda, "bfloat16").platform(hidden=256)
    gate_up, down = packed(kind, 2 * 128, 256, device), packed(kind, 256, 128, device)
    product = platform.experts(gate_up, down, "silu")
    matrices = [
        ExpertStack(DenseLinear(expanded(each, device)), NUM_EXPERTS) for each in (gate_up, down)
    ]
    expected = platform.experts(*matrices, "silu")
    for count in (1, 7, 100, 700):
        x = torch.randn(count, 256, device=device).bfloat16()
        logits = torch.randn(count, NUM_EXPERTS, device=device)
        routes = platform.route(logits, Router(num_chosen=2))
        assert torch.equal(product(x, routes), expected(x, routes)), count


@pytest.mark.gpu
def test_experts_without_kernels_are_refused_by_their_kind() -> None:
    platform = Subject(cuda, "bfloat16").platform(hidden=256)
    # Outputs of an expert are not whole in what the copy engine reads.
    gate_up, down = (packed("fp8", n, k, platform.device) for n, k in ((264, 256), (256, 128)))
    with pytest.raises(ConfigError, match="kind of weights of experts"):
        platform.experts(gate_up, down, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("has_gate", [True, False], ids=["gate", "no gate"])
def test_a_shared_expert_is_added_to_few_tokens_as_to_many(has_gate: bool) -> None:
    platform = Subject(cuda, "bfloat16").platform(hidden=2048)
    device = platform.device
    num_experts, inner, hidden = 16, 512, 2048

    def dense(n: int, k: int) -> DenseLinear:
        return DenseLinear((torch.randn(n, k, device=device) * k**-0.5).bfloat16())

    stacks = (
        ExpertStack(dense(num_experts * 2 * inner, hidden), num_experts),
        ExpertStack(dense(num_experts * hidden, inner), num_experts),
    )
    gate = dense(1, hidden) if has_gate else None
    mlp = Mlp(platform, dense(2 * inner, hidden), dense(hidden, inner), "silu")
    experts = Experts(
        platform,
        Router(num_chosen=8, is_normalized=True),
        platform.linear(dense(num_experts, hidden)),
        *stacks,
        "silu",
        Alone(),
        SharedExpert(platform, mlp, gate),
    )
    x = torch.randn(40, hidden, device=device).bfloat16()
    together = experts(x)
    for count in (1, 2, 3, 4, 5):
        assert torch.equal(experts(x[:count]), together[:count]), count


@pytest.mark.gpu
def test_a_token_is_normed_and_routed_as_many_are() -> None:
    platform = Subject(cuda, "bfloat16").platform(hidden=2048)
    device = platform.device
    num_experts, inner, hidden = 32, 256, 2048

    def dense(n: int, k: int) -> DenseLinear:
        return DenseLinear((torch.randn(n, k, device=device) * k**-0.5).bfloat16())

    router = dense(num_experts, hidden)
    experts = Experts(
        platform,
        Router(num_chosen=4, is_normalized=True),
        platform.linear(router),
        ExpertStack(dense(num_experts * 2 * inner, hidden), num_experts),
        ExpertStack(dense(num_experts * hidden, inner), num_experts),
        "silu",
        Alone(),
        norm=RMSNorm(platform, torch.rand(hidden, device=device).bfloat16(), 1e-6),
        router_weight=router.weight,
    )
    x, residual = (torch.randn(40, hidden, device=device).bfloat16() for _ in range(2))
    sums = residual.clone()
    together = experts.behind(x, sums)
    for i in range(40):
        token = slice(i, i + 1)
        alone = residual[token].clone()
        assert torch.equal(experts.behind(x[token], alone), together[token])
        assert torch.equal(alone, sums[token])
