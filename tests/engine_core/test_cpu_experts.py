"""Routes and products with experts on a CPU: against the specification, and a token's bits in any
company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.conformance.case import examine
from headwater.engine_core.conformance.experts import expert_cases
from headwater.engine_core.conformance.subject import Subject
from headwater.engine_core.devices import cpu
from headwater.engine_core.layers.linear.blocks import BlockLinear
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.fp8 import Fp8Linear
from headwater.engine_core.layers.linear.int4 import Int4Linear
from headwater.engine_core.layers.linear.int8 import Int8Linear
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.layers.linear.linear import Linear
from headwater.engine_core.layers.linear.packed import PackedExperts, pack_linears
from headwater.engine_core.layers.routing import ExpertStack, Router, Routes, Scoring
from headwater.engine_core.platforms import specification
from headwater.engine_core.platforms.cpu import CpuPlatform
from headwater.engine_core.platforms.cpu_experts import route, tiles_of
from headwater.engine_core.weights.rounding import ROUNDINGS
from headwater.kernels.cpu.experts.expert_product import ExpertProduct
from headwater.kernels.cpu.experts.expert_rows import rows_of_tokens, sort_by_expert
from headwater.kernels.quant.block_formats import Q4_K, Q8_0, BlockFormat, pack
from tests.kernels.random_blocks import random_rows
from tests.long_values import long_but

HIDDEN = 64
INNER = 32
NUM_EXPERTS = 6
NUM_CHOSEN = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Inputs are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def platform() -> CpuPlatform:
    made: CpuPlatform = Subject(cpu, "float32").platform(hidden=HIDDEN)
    return made


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)


def stack(weight: torch.Tensor) -> ExpertStack:
    """weight [E, N, K]"""
    return ExpertStack(DenseLinear(weight.flatten(0, 1)), len(weight))


def packed(*weights: torch.Tensor) -> list[ExpertStack]:
    """Stacks as a CPU serves them."""
    stacks = {str(i): stack(weight) for i, weight in enumerate(weights)}
    made = pack_linears(
        Weights(linears={}, tensors={}, experts=stacks), None, lambda done, total: None
    )
    return list(made.experts.values())


def weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2 I, H] and down [E, H, I]"""
    gate_up = random(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=1, dtype=dtype)
    return gate_up, random(NUM_EXPERTS, HIDDEN, INNER, seed=2, dtype=dtype)


def routes_of(num_tokens: int, *, of: int = NUM_EXPERTS) -> Routes:
    """Routes to any experts among the first `of`."""
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(of, generator=generator)[:NUM_CHOSEN] for _ in range(num_tokens)]
    return Routes(torch.stack(orders).int(), random(num_tokens, NUM_CHOSEN, seed=4).softmax(1))


@pytest.mark.parametrize("dtype", long_but(["float32", "bfloat16"], "float32"))
def test_every_router_and_product_is_that_of_its_twin(dtype: str) -> None:
    """The cases of the conformance suite, with the bits of each token in other batches."""
    lines = [examine(case) for case in expert_cases(Subject(cpu, dtype))]
    assert [line for line in lines if not line.passed] == []
    assert len(lines) == 11


def test_the_smaller_index_of_equal_scores_comes_first() -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 6, [-1.0, -0.0, 0.0, -1.0, 3, 0]]
    )
    chosen = route(logits, Router(num_chosen=3)).experts
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [4, 1, 2]]


def test_equal_groups_are_chosen_by_index_too() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    router = Router(num_chosen=3, scoring=Scoring.SIGMOID, num_groups=3, num_chosen_groups=2)
    assert route(logits, router).experts.tolist() == [[2, 3, 4]]
    one = Router(num_chosen=2, scoring=Scoring.SIGMOID, num_groups=3, num_chosen_groups=1)
    assert route(logits, one).experts.tolist() == [[2, 3]]


@pytest.mark.parametrize(("num_scores", "chosen"), [(1, [0, 1]), (2, [2, 3])])
def test_a_group_counts_as_the_sum_of_one_or_two_scores(num_scores: int, chosen: list[int]) -> None:
    logits = torch.tensor([[1.0, -9.0, 0.9, 0.8]])
    router = Router(num_chosen=2, num_groups=2, num_chosen_groups=1, num_group_scores=num_scores)
    assert route(logits, router).experts.tolist() == [chosen]
    assert specification.route(logits, router).experts.tolist() == [chosen]


def test_a_correction_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    correction = torch.tensor([5.0, 0.0, 0.0])
    router = Router(num_chosen=2, scoring=Scoring.SIGMOID, correction=correction, scale=2.0)
    routes = route(logits, router)
    assert routes.experts.tolist() == [[0, 2]]
    expected = 2 * torch.sigmoid(torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(routes.weights[0], expected)


def test_experts_of_excluded_groups_are_never_chosen_though_all_scores_are_negative() -> None:
    logits = torch.tensor([[3.0, 3.0, 0.0, 0.0]])
    correction = torch.full((4,), -9.0)
    router = Router(
        num_chosen=2,
        scoring=Scoring.SIGMOID,
        correction=correction,
        num_groups=2,
        num_chosen_groups=1,
    )
    assert route(logits, router).experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 33, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_in_any_company(num_tokens: int, dtype: torch.dtype) -> None:
    product = platform().experts(*packed(*weights(dtype)), "silu")
    x = random(num_tokens, HIDDEN, seed=5, dtype=dtype)
    routes = routes_of(num_tokens)
    together = product(x, routes)
    for i in range(num_tokens):
        alone = product(x[i : i + 1], Routes(routes.experts[i : i + 1], routes.weights[i : i + 1]))
        assert torch.equal(alone[0], together[i])
    logits = random(num_tokens, NUM_EXPERTS, seed=6, dtype=dtype) * 9
    router = Router(num_chosen=NUM_CHOSEN, scoring=Scoring.SIGMOID, is_normalized=True)
    for each in (router, Router(num_chosen=NUM_CHOSEN, is_normalized=True)):
        whole = route(logits, each)
        rows = [route(logits[i : i + 1], each) for i in range(num_tokens)]
        assert torch.equal(whole.experts, torch.cat([row.experts for row in rows]))
        assert torch.equal(whole.weights, torch.cat([row.weights for row in rows]))


def test_one_expert_takes_all_tokens_and_others_none() -> None:
    gate_up, down = weights()
    x = random(40, HIDDEN, seed=5)
    routes = Routes(torch.full((40, 1), 4, dtype=torch.int32), torch.full((40, 1), 0.5))
    out = platform().experts(*packed(gate_up, down), "silu")(x, routes)
    expected = specification.experts(x, routes, gate_up, down, "silu")
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


class Read(Linear):
    """Notes which outputs are asked for."""

    kind = "read"

    def __init__(self, whole: DenseLinear) -> None:
        self.out_features, self.in_features = whole.out_features, whole.in_features
        self._whole = whole
        self.asked: set[int] = set()

    def outputs(self, rows: range) -> Linear:
        self.asked.add(rows.start // len(rows))
        return self._whole.outputs(rows)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all experts at once")


def test_experts_that_no_token_chose_are_not_read() -> None:
    gate_up, down = (Read(DenseLinear(each.flatten(0, 1))) for each in weights())
    stacks = (ExpertStack(each, NUM_EXPERTS) for each in (gate_up, down))
    product = platform().experts(*stacks, "silu")
    product(random(9, HIDDEN, seed=5), routes_of(9, of=4))
    assert gate_up.asked == down.asked == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_lie_one_behind_the_other_and_multiply_alone(dtype: torch.dtype) -> None:
    gate_up, down = weights(dtype)
    for weight, made in zip((gate_up, down), packed(gate_up, down), strict=True):
        assert isinstance(made.linear, PackedExperts)
        x = random(7, weight.shape[2], seed=8, dtype=dtype)
        outs = made.linear.product(x).split(made.out_features, dim=1)
        for i, out in enumerate(outs):
            assert torch.equal(out, made.expert(i).product(x))
            expected = x.double() @ weight[i].double().T
            torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def blocks_of(weight: torch.Tensor, format: BlockFormat) -> Linear:
    seed = int(weight.shape[2])
    rows = random_rows(format, weight.shape[0] * weight.shape[1], weight.shape[2], seed)
    return BlockLinear((pack(rows, format),))


def grouped(weight: torch.Tensor, kind: str) -> Linear:
    """The weight of all experts, rounded."""
    flat = weight.flatten(0, 1)
    made = ROUNDINGS[kind](flat)
    assert made is not None
    return {"int4": Int4Linear, "int8": Int8Linear, "fp8": Fp8Linear}[kind](made, torch.float32)


KINDS: dict[str, Callable[[torch.Tensor], Linear]] = {
    "q4_k": lambda weight: blocks_of(weight, Q4_K),
    "q8_0": lambda weight: blocks_of(weight, Q8_0),
    **{kind: partial(grouped, kind=kind) for kind in ("int4", "int8", "fp8")},
}


@pytest.mark.parametrize("kind", long_but(KINDS, "q8_0"))
@pytest.mark.parametrize("dtype", long_but((torch.float32, torch.bfloat16), torch.bfloat16))
def test_one_call_for_all_experts_has_the_bits_of_each_expert_alone(
    kind: str, dtype: torch.dtype
) -> None:
    weight = random(NUM_EXPERTS, 48, 256, seed=1)
    stacks = {"w": ExpertStack(KINDS[kind](weight), NUM_EXPERTS)}
    weights = pack_linears(
        Weights(linears={}, tensors={}, experts=stacks), None, lambda done, total: None
    )
    made = weights.experts["w"]
    x = random(23, 256, seed=5, dtype=dtype)
    rows = sort_by_expert(routes_of(23, of=4).experts, NUM_EXPERTS)
    by_place = rows_of_tokens(x, rows)
    tiles = tiles_of(made)
    assert tiles is not None
    out = ExpertProduct(tiles)(by_place, rows)
    starts = rows.starts.tolist()
    assert starts[-1] == len(out) == 69
    assert rows.chosen.tolist() == [0, 1, 2, 3, -1, -1]
    for i in range(NUM_EXPERTS):
        own = slice(starts[i], starts[i + 1])
        if starts[i] < starts[i + 1]:
            alone = platform().linear(made.expert(i))(by_place[own].contiguous())
            assert torch.equal(out[own], alone)


def test_rows_are_sorted_by_expert_and_keep_the_order_of_tokens() -> None:
    experts = torch.tensor([[3, 0], [0, 5], [3, 5]], dtype=torch.int32)
    rows = sort_by_expert(experts, 6)
    assert rows.starts.tolist() == [0, 2, 2, 2, 4, 4, 6]
    assert rows.chosen.tolist() == [0, 3, 5, -1, -1, -1]
    assert rows.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.places.tolist() == [2, 0, 1, 4, 3, 5]
    x = random(3, 32)
    assert torch.equal(rows_of_tokens(x, rows), x[[0, 1, 0, 2, 1, 2]])


def test_routes_of_logits_that_are_no_numbers_are_experts_all_the_same() -> None:
    logits = torch.full((2, 6), float("nan"))
    for scoring in Scoring:
        router = Router(num_chosen=3, scoring=scoring, num_groups=3, num_chosen_groups=2)
        experts = route(logits, router).experts
        assert (experts >= 0).all()
        assert (experts < 6).all()


def test_a_kind_that_cannot_be_cut_by_expert_is_refused_by_its_name() -> None:
    class Whole(DenseLinear):
        kind = "whole"
        outputs = Linear.outputs

    with pytest.raises(ConfigError, match="kind of weights of experts is 'whole'; allowed: one"):
        ExpertStack(Whole(random(6, 8)), 3).expert(1)
