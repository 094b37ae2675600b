"""Products with experts of which each rank has some, and sums in a tree."""

from __future__ import annotations

import pytest
import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts import work_list
from headwater.kernels.experts.clamped_gate import ExpertBiases
from headwater.kernels.experts.combine_tree import combine_tree, combine_tree_twin
from headwater.kernels.experts.expert_product import expert_product
from headwater.kernels.experts.expert_rows import PAIRS
from headwater.kernels.experts.expert_sum import ExpertPart
from headwater.kernels.experts.packed_product import packed_expert_product
from headwater.kernels.experts.route import Choice, route, route_twin
from headwater.kernels.experts.work_list import list_tiles
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.gemm.tree_sum import tree_sum
from tests.kernels.paging import GPU, LONG_INTERPRETED, relative_error
from tests.kernels.test_expert_packed import random_words
from tests.kernels.test_expert_product import Mixture, random_biases

SMALL = (64, 32, 8, 2)
QWEN = (2048, 768, 128, 8)
GPT_OSS = (2880, 2880, 32, 4)
BIASES = [pytest.param(False, marks=LONG_INTERPRETED), True]
CASES = [
    pytest.param(1, SMALL, id="one token"),
    pytest.param(5, SMALL, id="without a list", marks=LONG_INTERPRETED),
    pytest.param(PAIRS[-1] // 2 + 1, SMALL, id="with a list", marks=GPU),
    *(
        pytest.param(count, shape, marks=GPU, id=f"{count} tokens of {shape[0]}")
        for shape in (QWEN, GPT_OSS)
        for count in (1, 4, 33, 300, 2000, 9000)
    ),
]


def own_of(experts: torch.Tensor, rank: int, count: int) -> torch.Tensor:
    """Routes as a rank with so many experts has them."""
    own = experts - rank * count
    return own.masked_fill((own < 0) | (own >= count), -1).contiguous()


def of_rank(
    mixture: Mixture, rank: int, size: int, biases: ExpertBiases | None
) -> dict[str, object]:
    """Weights and biases of a rank's experts."""
    return {
        "gate_up": mixture.gate_up.chunk(size)[rank].contiguous(),
        "down": mixture.down.chunk(size)[rank].contiguous(),
        "biases": biases
        and ExpertBiases(
            biases.gate_up.chunk(size)[rank].contiguous(),
            biases.down.chunk(size)[rank].contiguous(),
        ),
    }


@pytest.mark.parametrize("has_biases", BIASES)
@pytest.mark.parametrize(("count", "shape"), CASES)
def test_a_rank_adds_the_outputs_of_its_own_experts(
    count: int, shape: tuple[int, int, int, int], has_biases: bool, generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = mixture.tokens(count)
    experts, weights = mixture.routes(count)
    biases = random_biases(mixture) if has_biases else None
    num_own = shape[2] // 2
    for rank in range(2):
        own = own_of(experts, rank, num_own)
        parts = of_rank(mixture, rank, 2, biases)
        out = expert_product(x, own, weights, **parts, part=ExpertPart(is_share=True))
        # What counts for nothing adds zeros.
        others = weights.masked_fill(own < 0, 0)
        whole = expert_product(x, experts, others, mixture.gate_up, mixture.down, biases=biases)
        assert torch.equal(out, whole)


@pytest.mark.parametrize("has_biases", BIASES)
@pytest.mark.parametrize(("count", "shape"), CASES)
def test_ranks_add_up_to_the_tree_of_one(
    count: int, shape: tuple[int, int, int, int], has_biases: bool, generator: torch.Generator
) -> None:
    mixture = Mixture.make(*shape, generator)
    x = mixture.tokens(count)
    experts, weights = mixture.routes(count)
    biases = random_biases(mixture) if has_biases else None
    sums = []
    for size in (1, 2, 4, 8) if count > 1 else (1, 4):
        num_own = shape[2] // size
        part = ExpertPart(is_share=size > 1, num_leaves=8 // size)
        outs = [
            expert_product(
                x,
                own_of(experts, rank, num_own),
                weights,
                **of_rank(mixture, rank, size, biases),
                part=part,
            )
            for rank in range(size)
        ]
        assert {each.dtype for each in outs} == {torch.float32}
        sums.append(tree_sum(outs))
    assert all(torch.equal(each, sums[0]) for each in sums)
    plain = expert_product(x, experts, weights, mixture.gate_up, mixture.down, biases=biases)
    assert relative_error(sums[0], plain) < 4e-3


@pytest.mark.parametrize("num_leaves", [1, 2, 4, 8])
def test_groups_of_experts_are_added_in_a_tree(num_leaves: int, generator: torch.Generator) -> None:
    device = generator.device
    y = torch.randn(3, 5, 96, generator=generator, device=device)
    weights = torch.rand(3, 5, generator=generator, device=device)
    experts = torch.tensor(
        [[0, 9, 15, -1, 3], [-1] * 5, [4, 5, 6, 7, 8]], dtype=torch.int32, device=device
    )
    out = torch.empty(3, 96, device=device)
    combine_tree(y.flatten(0, 1), weights, out, None, experts, 16, num_leaves)
    twin = combine_tree_twin(y, weights, experts, 16, num_leaves)
    assert relative_error(out, twin) < 1e-6
    assert not out[1].any()


@GPU
@pytest.mark.parametrize("count", [1, 2, 16, 64, 300, 2500])
@pytest.mark.parametrize("kind", ["int4", "fp8 in blocks"])
def test_packed_experts_of_a_rank_have_the_bits_of_all(
    kind: str, count: int, generator: torch.Generator
) -> None:
    if not is_hopper(generator.device):
        pytest.skip("for Hopper")
    hidden, inner, num_experts, num_chosen = 1024, 640, 24, 3
    gate_up = random_words(kind, num_experts * 2 * inner, hidden, generator)
    down = random_words(kind, num_experts * hidden, inner, generator)
    x = torch.randn(count, hidden, generator=generator, device=generator.device).bfloat16()
    logits = torch.randn(count, num_experts, generator=generator, device=generator.device)
    experts, weights = route(logits, Choice(num_chosen=num_chosen, is_normalized=True))
    for rank in range(2):
        own = own_of(experts, rank, num_experts // 2)
        matrices = [_half(each, rank) for each in (gate_up, down)]
        out = packed_expert_product(
            x, own, weights, *matrices, num_experts // 2, part=ExpertPart(is_share=True)
        )
        others = weights.masked_fill(own < 0, 0)
        assert torch.equal(
            out, packed_expert_product(x, experts, others, gate_up, down, num_experts)
        )


def _half(weight: PackedWords, rank: int) -> PackedWords:
    def of(tensor: torch.Tensor | None, axis: int) -> torch.Tensor | None:
        return None if tensor is None else tensor.chunk(2, axis)[rank].contiguous()

    return PackedWords(
        words=of(weight.words, 0),
        scales=of(weight.scales, 1),
        zeros=of(weight.zeros, 1),
        bits=weight.bits,
    )


@pytest.mark.parametrize("num_pairs_at_once", [work_list.MOST_AT_ONCE, 0])
def test_pairs_of_other_ranks_are_in_no_tile(
    num_pairs_at_once: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_list, "MOST_AT_ONCE", num_pairs_at_once)
    monkeypatch.setattr(work_list, "SEGMENT", 32)
    shape = (41, 3)
    experts = torch.randint(
        -4, 11, shape, generator=generator, device=generator.device, dtype=torch.int32
    ).clamp(-1)
    work = list_tiles(experts, 11, block_m=16)
    listed = []
    for i in range(int(work.num_tiles)):
        _, first, count = work.tiles[:, i].tolist()
        listed += work.pairs[first : first + count].tolist()
    flat = experts.flatten()
    assert sorted(listed) == (flat >= 0).nonzero().flatten().tolist()
    assert torch.equal(work.places < 0, flat < 0)


def test_routes_number_the_experts_of_a_rank_from_zero(generator: torch.Generator) -> None:
    logits = torch.randn(17, 24, generator=generator, device=generator.device)
    everywhere = Choice(num_chosen=5, is_normalized=True)
    own = Choice(num_chosen=5, is_normalized=True, own=range(8, 16))
    experts, weights = route(logits, own)
    whole, whole_weights = route(logits, everywhere)
    assert torch.equal(experts, own_of(whole, 1, 8))
    assert torch.equal(weights, whole_weights)
    assert torch.equal(experts, route_twin(logits, own)[0])
