from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts.clamped_gate import ExpertBiases
from headwater.kernels.experts.combine import copy_tokens
from headwater.kernels.experts.expert_product import (
    GATHERED_ROWS,
    ROW_TILES,
    expert_product,
    expert_product_twin,
    is_gathered,
)
from headwater.kernels.experts.expert_rows import PAIRS
from headwater.kernels.experts.hopper_grouped_gemm import TEAM_ROWS, grouped_gemm
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.experts.work_list import list_tiles
from tests.kernels.paging import GPU, POISON, relative_error


@dataclass(slots=True)
class Mixture:
    """Random experts of one layer."""

    num_chosen: int
    gate_up: torch.Tensor
    down: torch.Tensor
    generator: torch.Generator

    @classmethod
    def make(
        cls, hidden: int, inner: int, num_experts: int, num_chosen: int, generator: torch.Generator
    ) -> Mixture:
        def randn(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=generator.device)
            return (values * shape[-1] ** -0.5).bfloat16()

        gate_up = randn(num_experts, 2 * inner, hidden)
        return cls(num_chosen, gate_up, randn(num_experts, hidden, inner), generator)

    def tokens(self, count: int) -> torch.Tensor:
        shape = (count, self.gate_up.shape[2])
        return torch.randn(shape, generator=self.generator, device=self.generator.device).bfloat16()

    def routes(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (count, len(self.down))
        logits = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return route(logits, Choice(num_chosen=self.num_chosen, is_normalized=True))

    def product(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return expert_product(x, experts, weights, self.gate_up, self.down)

    def twin(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return expert_product_twin(x.double(), experts, weights, self.gate_up, self.down)


SMALL = (128, 256, 6, 2)
QWEN = (2048, 768, 128, 8)


@pytest.mark.parametrize(
    ("count", "shape"),
    [
        pytest.param(1, SMALL, id="one token"),
        pytest.param(20, SMALL, id="without a list"),
        pytest.param(PAIRS[-1] // 2 + 1, SMALL, id="with a list", marks=pytest.mark.long),
        pytest.param(7, (160, 64, 6, 3), id="inputs that are no whole tiles"),
        *(
            pytest.param(count, QWEN, marks=GPU, id=f"{count} tokens")
            for count in (1, 4, 5, 33, 300, 2000)
        ),
        pytest.param(2000, (1024, 352, 40, 3), marks=GPU, id="outputs that are no whole tiles"),
    ],
)
def test_sums_of_experts_agree_with_float64(
    count: int, shape: tuple[int, int, int, int], generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = mixture.tokens(count)
    routes = mixture.routes(count)
    # Three roundings to eight bits of fraction one after another.
    assert relative_error(mixture.product(x, *routes), mixture.twin(x, *routes)) < 6e-3


@pytest.mark.parametrize(
    ("count", "shape"),
    [
        pytest.param(3, SMALL, id="few"),
        pytest.param(PAIRS[-1] // 2 + 1, SMALL, id="with a list", marks=pytest.mark.long),
        *(
            pytest.param(count, (2880, 2880, 32, 4), marks=GPU, id=f"{count} tokens")
            for count in (1, 8, 9, 65, 300, 600, 2000)
        ),
    ],
)
def test_biased_experts_with_a_clamped_gate_agree_with_float64(
    count: int, shape: tuple[int, int, int, int], generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = 8 * mixture.tokens(count)
    experts, weights = mixture.routes(count)
    biases = random_biases(mixture)
    matrices = mixture.gate_up, mixture.down
    twin = expert_product_twin(x.double(), experts, weights, *matrices, biases=biases)
    out = expert_product(x, experts, weights, *matrices, biases=biases)
    assert relative_error(out, twin) < 6e-3
    without = expert_product_twin(x.double(), experts, weights, *matrices)
    assert relative_error(without, twin) > 0.1


def random_biases(mixture: Mixture) -> ExpertBiases:
    num_experts, hidden, inner = mixture.down.shape
    device = mixture.down.device
    gate_up, down = (
        torch.randn(num_experts, size, generator=mixture.generator, device=device).bfloat16()
        for size in (2 * inner, hidden)
    )
    return ExpertBiases(gate_up, down)


def test_a_product_of_no_tokens_is_empty(generator: torch.Generator) -> None:
    mixture = Mixture.make(*SMALL, generator)
    out = mixture.product(mixture.tokens(0), *(each[:0] for each in mixture.routes(1)))
    assert out.shape == (0, 128)


@pytest.mark.parametrize(
    ("count", "shape"),
    [
        pytest.param(5, SMALL, id="5 tokens"),
        *(
            pytest.param(count, QWEN, marks=GPU, id=f"{count} tokens")
            for count in (2, 30, 100, 3000)
        ),
    ],
)
def test_one_expert_may_have_all_rows(
    count: int, shape: tuple[int, int, int, int], generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = mixture.tokens(count)
    experts, weights = mixture.routes(count)
    experts[:] = torch.arange(mixture.num_chosen, device=experts.device)
    experts[:, 0] = len(mixture.down) - 1
    out = mixture.product(x, experts, weights)
    assert relative_error(out, mixture.twin(x, experts, weights)) < 6e-3


@pytest.mark.parametrize("count", [3, 20, pytest.param(700, marks=GPU)])
def test_experts_of_four_byte_weights_agree_with_float64(
    count: int, generator: torch.Generator
) -> None:
    mixture = Mixture.make(*SMALL, generator)
    mixture.gate_up = mixture.gate_up.float()
    mixture.down = mixture.down.float()
    x = mixture.tokens(count).float()
    routes = mixture.routes(count)
    assert relative_error(mixture.product(x, *routes), mixture.twin(x, *routes)) < 1e-6


@GPU
@pytest.mark.parametrize("shape", [QWEN, (1024, 352, 40, 3), (2880, 2880, 32, 4)], ids=str)
def test_a_token_has_the_same_bits_in_every_batch(
    shape: tuple[int, int, int, int], generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = mixture.tokens(9001)
    experts, weights = mixture.routes(9001)
    together = mixture.product(x, experts, weights)
    for count in (*range(1, 65), 77, 129, 256, 257, 511, 1023, 1025, 2049, 5001):
        first = int(torch.randint(9001 - count, (1,)))
        some = slice(first, first + count)
        alone = mixture.product(x[some], experts[some], weights[some])
        assert torch.equal(alone, together[some]), count


@GPU
@pytest.mark.parametrize("count", [4, 24, 160, 2048])
def test_a_graph_holds_for_any_routing(count: int, generator: torch.Generator) -> None:
    mixture = Mixture.make(*QWEN, generator)
    x = mixture.tokens(count)
    experts, weights = mixture.routes(count)
    expert_product(x, experts, weights, mixture.gate_up, mixture.down, dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_product(x, experts, weights, mixture.gate_up, mixture.down, dependent=True)
    for routing in ("other", "few", "one"):
        x.copy_(mixture.tokens(count))
        other, others_weights = mixture.routes(count)
        if routing != "other":
            other %= 9 if routing == "few" else 1
        experts.copy_(other)
        weights.copy_(others_weights)
        graph.replay()
        expected = mixture.product(x, experts, weights)
        assert torch.equal(out, expected), routing


@GPU
@pytest.mark.parametrize("count", [1, 3, 24, 160, 600])
def test_products_that_start_early_wait_for_one_another(
    count: int, generator: torch.Generator
) -> None:
    mixture = Mixture.make(1024, 512, 32, 4, generator)
    logits = torch.randn(1024, 32, generator=generator, device=generator.device).bfloat16()

    def chain(x: torch.Tensor, *, dependent: bool) -> torch.Tensor:
        for _ in range(50):
            experts, weights = route(
                x @ logits, Choice(num_chosen=4, is_normalized=True), dependent=dependent
            )
            y = expert_product(
                x, experts, weights, mixture.gate_up, mixture.down, dependent=dependent
            )
            x = torch.nn.functional.rms_norm(x + y, (1024,))
        return x

    x = mixture.tokens(count)
    alone = chain(x, dependent=False)
    assert bool(alone.isfinite().all())
    assert all(torch.equal(chain(x, dependent=True), alone) for _ in range(4))


def test_tokens_are_gathered_where_a_thread_copies_whole_parts_of_them() -> None:
    x = torch.zeros(16, 128, dtype=torch.bfloat16)
    least, most = GATHERED_ROWS
    assert is_gathered(x, least * 6, 6)
    assert not is_gathered(x, least * 6 - 1, 6)
    assert not is_gathered(x, most * 6, 6)
    assert not is_gathered(x[:, 1:65], least * 6, 6)
    assert not is_gathered(torch.zeros(16, 96, dtype=torch.bfloat16), least * 6, 6)


@GPU
@pytest.mark.parametrize("count", [3000, 130])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_rows_that_warps_gather_have_the_bits_of_sorted_ones(
    count: int, is_gelu: bool, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    mixture = Mixture.make(*QWEN, generator)
    x = mixture.tokens(count)
    experts, _ = mixture.routes(count)
    experts[: count // 2, 0] = 5
    work = list_tiles(experts, 128, block_m=128, align=TEAM_ROWS)
    rows = torch.full((work.num_rows, 2048), POISON, device=x.device).bfloat16()
    copy_tokens(x, rows, work.places)
    options = {"num_programs": 132, "gates": True, "is_gelu": is_gelu}
    expected, out = torch.full((2, work.num_rows, 768), POISON, device=x.device).bfloat16()
    grouped_gemm(rows, mixture.gate_up, expected, work, **options)
    places = work.places.long()
    for _ in range(5):
        grouped_gemm(x, mixture.gate_up, out, work, shared_by=8, **options)
        assert torch.equal(out[places], expected[places])
        out.fill_(POISON)


def test_tiles_fit_in_shared_memory() -> None:
    for block_m, (gates, others) in ROW_TILES.items():
        for tiles, columns in ((gates, 2 * gates.block_n), (others, others.block_n)):
            assert tiles.block_m == block_m
            stage = 2 * tiles.block_k * (tiles.block_m + columns)
            assert stage * tiles.num_stages <= 227 << 10
