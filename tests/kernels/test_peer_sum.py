from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headwater.kernels.gemm.tree_sum import tree_sum
from headwater.kernels.norm.rms_norm import add_rms_norm
from headwater.kernels.peer.peer_join import peer_join
from headwater.kernels.peer.peer_memory import PeerMemory, slot_bytes_of
from headwater.kernels.peer.peer_sum import (
    GROUP_ROWS,
    Way,
    peer_sum,
    peer_sum_add_rms_norm,
    peer_sum_twin,
    peer_tree_sum,
)
from headwater.kernels.sampling.peer_best import peer_best
from headwater.kernels.sampling.sample import Candidates
from tests.kernels.paging import GPU, LONG_INTERPRETED, relative_error
from tests.kernels.peer_rank import PeerRanks, peer_ranks

SLOT_BYTES = slot_bytes_of(GROUP_ROWS * 4096 * 4)
SHAPES = [
    pytest.param(1, 64, marks=LONG_INTERPRETED),
    pytest.param(5, 576, marks=LONG_INTERPRETED),
    (3, 1000),
    pytest.param(700, 4096, marks=GPU),
    pytest.param(64, 1023, marks=GPU),
]
WAYS = [
    pytest.param(
        way,
        dtype,
        marks=LONG_INTERPRETED if dtype == torch.float32 and way is not Way.GROUPED else (),
    )
    for way in Way
    for dtype in (torch.bfloat16, torch.float32)
    if way is not Way.FLAGGED or dtype == torch.bfloat16
]
"""Flagged words carry 16 bits. Sums are in float32, and only the last cast depends on the type:
`make test` interprets one way without it."""
MEMORIES = ["GPUs", pytest.param("host", marks=LONG_INTERPRETED)]
"""Where pieces lie: sums and choices have the same bits."""
ROUNDED = 3e-3
"""Relative error of rounding to bfloat16, which alone costs 1.7e-3."""


@pytest.fixture(scope="module", params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def two(memory: str) -> Iterator[PeerRanks]:
    with peer_ranks(2, SLOT_BYTES, is_host=memory == "host") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(memory: str) -> Iterator[PeerRanks]:
    with peer_ranks(3, SLOT_BYTES, is_host=memory == "host") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(memory: str) -> Iterator[PeerRanks]:
    with peer_ranks(4, SLOT_BYTES, is_host=memory == "host") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight() -> Iterator[PeerRanks]:
    with peer_ranks(8, SLOT_BYTES) as ranks:
        yield ranks


def device_of(memory: PeerMemory) -> torch.device:
    return memory.bases.device


def summed(memory: PeerMemory, x: torch.Tensor, way: Way) -> torch.Tensor:
    return peer_sum(flagging(memory, x), x.to(device_of(memory)), way=way).cpu()


def tree_summed(
    memory: PeerMemory, x: torch.Tensor, dtype: torch.dtype, way: Way | None
) -> torch.Tensor:
    return peer_tree_sum(memory, x.to(device_of(memory)), dtype, way=way).cpu()


def flagging(memory: PeerMemory, x: torch.Tensor) -> PeerMemory:
    """The memory for rows as long as those of x."""
    return replace(memory, flagged_len=x.shape[1])


def normed(
    memory: PeerMemory, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm and residual, fused and one after the other."""
    own, kept, scale = (each.to(device_of(memory)) for each in (x, residual, weight))
    again = kept.clone()
    fused = peer_sum_add_rms_norm(flagging(memory, x), own, kept, scale, 1e-6, way=way)
    apart = add_rms_norm(peer_sum(memory, own), again, scale, 1e-6)
    return fused.cpu(), kept.cpu(), apart.cpu(), again.cpu()


def joined(memory: PeerMemory, x: torch.Tensor) -> torch.Tensor:
    return peer_join(memory, x.to(device_of(memory))).cpu()


def best(memory: PeerMemory, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(scores),), -1, dtype=torch.int32, device=device_of(memory))
    candidates = Candidates(scores=scores.to(out.device), ids=ids.to(out.device))
    peer_best(memory, candidates, scores.shape[1], out)
    return out.cpu()


def replayed(memory: PeerMemory, x: torch.Tensor, num_replays: int) -> list[torch.Tensor]:
    """Sums of a graph that is replayed beside launches of other sizes."""
    own = x.to(device_of(memory))
    found = []
    peer_sum(memory, own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = peer_sum(memory, own)
        twice = peer_sum(memory, once)
    for i in range(num_replays):
        own.fill_(float(memory.index + i))
        graph.replay()
        peer_sum(memory, own[: 1 + i % len(own)])
        found += [once.cpu(), twice.cpu()]
    return found


def waited(memory: PeerMemory, launches: bool) -> str:
    """What becomes of a rank that waits for one that never comes."""
    try:
        if launches:
            peer_sum(replace(memory, max_polls=1 << 12), torch.zeros(1, 64, device="cuda"))
            torch.cuda.synchronize()
    except RuntimeError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("way", "dtype"), WAYS)
@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_a_sum_is_added_in_the_order_of_the_ranks_and_rounded_once(
    two: PeerRanks, three: PeerRanks, num_tokens: int, hidden: int, way: Way, dtype: torch.dtype
) -> None:
    for ranks in (two, three):
        parts = [
            (torch.randn(num_tokens, hidden) * 10**rank).to(dtype) for rank in range(ranks.size)
        ]
        sums = ranks(summed, parts, [way] * ranks.size)
        expected = peer_sum_twin(parts).to(dtype)
        assert all(torch.equal(each, expected) for each in sums)
        exact = peer_sum_twin([part.double() for part in parts])
        assert relative_error(sums[0], exact) < (ROUNDED if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("num_tokens", [pytest.param(9, marks=LONG_INTERPRETED)])
def test_numbers_of_rows_are_added(two: PeerRanks, num_tokens: int) -> None:
    """As those are that norms over all heads are made of."""
    parts = [torch.randn(num_tokens, 1) for _ in range(2)]
    expected = peer_sum_twin(parts)
    assert all(torch.equal(each, expected) for each in two(summed, parts, [None] * 2))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    "way",
    [
        None,
        *(pytest.param(way, marks=LONG_INTERPRETED) for way in (Way.ONE_SHOT, Way.GROUPED)),
        Way.TWO_SHOTS,
    ],
)
@pytest.mark.parametrize("size", ["two", "four", pytest.param("eight", marks=LONG_INTERPRETED)])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(2, 72), pytest.param(700, 4096, marks=GPU)])
def test_a_sum_is_added_in_a_tree_and_rounded_once(
    num_tokens: int, hidden: int, size: str, way: Way | None, request: pytest.FixtureRequest
) -> None:
    ranks: PeerRanks = request.getfixturevalue(size)
    parts = [torch.randn(num_tokens, hidden) * 10 ** (rank % 3) for rank in range(ranks.size)]
    for dtype in (torch.float32, torch.bfloat16):
        sums = ranks(tree_summed, parts, [dtype] * ranks.size, [way] * ranks.size)
        assert all(torch.equal(each, tree_sum(parts).to(dtype)) for each in sums)
    if ranks.size > 2:
        assert not torch.equal(peer_sum_twin(parts), tree_sum(parts))


# Rows by each way are held to the whole by one of them.
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=LONG_INTERPRETED if way is not Way.GROUPED else ()) for way in Way],
)
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place(two: PeerRanks, way: Way) -> None:
    parts = [torch.randn(13, 200).bfloat16() for _ in range(2)]
    [whole, _] = two(summed, parts, [way] * 2)
    for rows in (slice(4, 5), slice(3, 11), slice(12, 13)):
        for other in Way:
            for some in two(summed, [part[rows] for part in parts], [other] * 2):
                assert torch.equal(some, whole[rows])


def in_turn(memory: PeerMemory, parts: list[torch.Tensor], ways: list[Way]) -> list[torch.Tensor]:
    """Sums of tensors of several sizes, one after another without a pause."""
    sums = [
        peer_sum(flagging(memory, parts[0]), part.to(device_of(memory)), way=way)
        for part, way in zip(parts, ways, strict=True)
    ]
    return [each.cpu() for each in sums]


def test_launches_of_all_ways_and_sizes_follow_one_another(two: PeerRanks) -> None:
    ways = [
        Way.FLAGGED,
        Way.ONE_SHOT,
        Way.FLAGGED,
        Way.GROUPED,
        Way.TWO_SHOTS,
        Way.FLAGGED,
        Way.FLAGGED,
        Way.GROUPED,
    ]
    ways += [Way.GROUPED_TWO_SHOTS, Way.FLAGGED, Way.GROUPED_TWO_SHOTS, Way.TWO_SHOTS]
    sizes = [3, 7, 1, 9, 2, 5, 4, 6, 11, 1, 3, 6]
    parts = [[torch.randn(size, 96).bfloat16() for size in sizes] for _ in range(2)]
    for sums in two(in_turn, parts, [ways] * 2):
        for ours, theirs, found in zip(*parts, sums, strict=True):
            assert torch.equal(found, peer_sum_twin([ours, theirs]).bfloat16())


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way, marks=() if way in (Way.FLAGGED, Way.GROUPED_TWO_SHOTS) else LONG_INTERPRETED
        )
        for way in Way
    ],
)
@pytest.mark.parametrize(("num_tokens", "hidden"), SHAPES)
def test_the_norm_behind_a_sum_has_the_bits_of_the_norm_alone(
    two: PeerRanks, num_tokens: int, hidden: int, way: Way
) -> None:
    parts = [torch.randn(num_tokens, hidden).bfloat16() for _ in range(2)]
    residual = torch.randn(num_tokens, hidden).bfloat16()
    weight = torch.rand(hidden).bfloat16()
    for fused, kept, apart, again in two(normed, parts, [residual] * 2, [weight] * 2, [way] * 2):
        assert torch.equal(fused, apart)
        assert torch.equal(kept, again)


@pytest.mark.parametrize(
    "shape", [(1, 5), pytest.param((7, 33), marks=LONG_INTERPRETED), (3, 9000)]
)
def test_parts_of_rows_stand_side_by_side(three: PeerRanks, shape: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        parts = [(100 * torch.randn(shape)).to(dtype) for _ in range(3)]
        assert all(torch.equal(each, torch.cat(parts, 1)) for each in three(joined, parts))


def test_the_best_token_of_all_ranks_is_chosen_and_the_smaller_one_of_equals(
    three: PeerRanks,
) -> None:
    scores = [torch.randint(0, 3, (6, 5)).float() for _ in range(3)]
    ids = [
        torch.arange(5, dtype=torch.int32).expand(6, 5).contiguous() + 5 * rank for rank in range(3)
    ]
    scores[2][0, 3] = 9.0
    scores[0][1] = float("-inf")
    scores[1][1] = float("-inf")
    expected = torch.cat(scores, 1).argmax(1).int()
    assert expected[0] == 13
    assert all(torch.equal(each, expected) for each in three(best, scores, ids))


def test_pieces_in_host_memory_give_the_same_sums_and_rows() -> None:
    """The cheapest case of each kernel; all others run in `make test-long` and on GPUs."""
    parts = [torch.randn(3, 96).bfloat16() for _ in range(2)]
    expected = peer_sum_twin(parts).bfloat16()
    with peer_ranks(2, SLOT_BYTES, is_host=True) as ranks:
        for way in Way:
            assert all(torch.equal(each, expected) for each in ranks(summed, parts, [way] * 2))
        assert all(torch.equal(each, torch.cat(parts, 1)) for each in ranks(joined, parts))
        leaves = [part.float() for part in parts]
        trees = ranks(tree_summed, leaves, [torch.float32] * 2, [None] * 2)
        assert all(torch.equal(each, tree_sum(leaves)) for each in trees)


@pytest.mark.gpu
def test_a_graph_goes_on_where_the_last_launch_ended(two: PeerRanks) -> None:
    found = two(replayed, [torch.zeros(9, 128).bfloat16()] * 2, [6] * 2)
    for ours in found:
        for i in range(6):
            assert ours[2 * i].eq(2 * i + 1).all()
            assert ours[2 * i + 1].eq(4 * i + 2).all()


@pytest.mark.gpu
def test_a_rank_that_waits_in_vain_stops(memory: str) -> None:
    with peer_ranks(2, SLOT_BYTES, is_host=memory == "host") as ranks:
        stopped, idle = ranks(waited, [True, False])
    assert stopped
    assert not idle
