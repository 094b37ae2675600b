"""Filtered draws and log probabilities where ranks have the logits of some tokens each: to the bit
those of one process, whatever the slices are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch

from headwater.kernels.peer.peer_memory import PeerMemory
from headwater.kernels.sampling.filtered_sample import Filters, filter_twin, filtered_sample
from headwater.kernels.sampling.logprobs import logprobs_of
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.vocabulary_slice import VocabularySlice
from tests.kernels.paging import GPU, LONG_INTERPRETED
from tests.kernels.peer_rank import PeerRanks, peer_ranks
from tests.long_values import long_but

SLOT_BYTES = 16 << 10
FILTERS = {
    "top-k": (5, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "small top-p": (0, 0.01, 0.0),
    "min-p": (0, 1.0, 0.1),
    "top-k and p": (40, 0.8, 0.0),
    "large top-k and p": (300, 0.95, 0.0),
    "all": (50, 0.95, 0.02),
    "large top-k, all": (400, 0.9, 0.001),
}
SHAPES = [(1.0, 3.0), (0.7, 0.5), (2.0, 8.0)]
"""Temperatures, and how far logits lie apart."""


RANKS = {"2": (2, False), "3": (3, False), "2 over host memory": (2, True)}


@pytest.fixture(scope="module", params=long_but(RANKS, "2"))
def ranks(request: pytest.FixtureRequest) -> Iterator[PeerRanks]:
    size, is_host = RANKS[request.param]
    with peer_ranks(size, SLOT_BYTES, is_host=is_host) as group:
        yield group


@dataclass(frozen=True)
class Case:
    """Rows of logits [R, V], what is asked of them, and where the slices of the ranks end."""

    logits: torch.Tensor
    filters: list[tuple[int, float, float]]
    temperatures: list[float]
    ends: list[int]

    def on(self, device: torch.device) -> tuple[torch.Tensor, Draws, Filters]:
        counters = torch.arange(len(self.logits), dtype=torch.int32, device=device)
        top_ks, top_ps, min_ps = (
            torch.tensor(column, device=device) for column in zip(*self.filters, strict=True)
        )
        draws = Draws(
            temperatures=torch.tensor(self.temperatures, device=device),
            seeds=counters.long() * 7919,
            choice_indices=torch.zeros_like(counters),
            output_indices=counters,
        )
        return (
            self.logits.to(device),
            draws,
            Filters(top_ks=top_ks.int(), top_ps=top_ps, min_ps=min_ps),
        )

    def slice_of(
        self, memory: PeerMemory, logits: torch.Tensor
    ) -> tuple[torch.Tensor, VocabularySlice]:
        first = [0, *self.ends][memory.index]
        end = self.ends[memory.index]
        return logits[:, first:end], VocabularySlice(
            memory=memory, first_token=first, vocab_size=logits.shape[1]
        )


def drawn(memory: PeerMemory, case: Case, is_part: bool) -> list[int]:
    logits, draws, filters = case.on(memory.bases.device)
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=logits.device)
    if is_part:
        rows, part = case.slice_of(memory, logits)
        filtered_sample(rows, draws, filters, out, part)
    elif memory.index == 0:
        filtered_sample(logits, draws, filters, out)
    tokens: list[int] = out.tolist()
    return tokens


def scored(
    memory: PeerMemory, case: Case, token_ids: torch.Tensor, num_top: int, is_part: bool
) -> list[torch.Tensor]:
    logits, _, _ = case.on(memory.bases.device)
    rows, part = case.slice_of(memory, logits) if is_part else (logits, None)
    return [each.cpu() for each in logprobs_of(rows, token_ids.to(logits.device), num_top, part)]


def tokens_of(ranks: PeerRanks, case: Case) -> list[int]:
    """The tokens of one process, which all ranks have drawn as well."""
    whole, *_ = ranks(drawn, [case] * ranks.size, [False] * ranks.size)
    for tokens in ranks(drawn, [case] * ranks.size, [True] * ranks.size):
        assert tokens == whole
    return whole


def uneven(vocab_size: int, num_ranks: int) -> list[int]:
    return [vocab_size // 9 * (1 + 3 * rank) for rank in range(num_ranks - 1)] + [vocab_size]


@pytest.mark.parametrize("dtype", long_but((torch.float32, torch.bfloat16), torch.bfloat16))
@pytest.mark.parametrize(
    "vocab_size",
    [500, pytest.param(9001, marks=pytest.mark.long), pytest.param(151_936, marks=GPU)],
)
def test_filtered_draws_are_those_of_one_process(
    ranks: PeerRanks, vocab_size: int, dtype: torch.dtype
) -> None:
    asked = [
        (filters, *shape) for filters, shape in zip(FILTERS.values(), cycle(SHAPES), strict=False)
    ]
    spreads = torch.tensor([spread for _, _, spread in asked])[:, None]
    logits = (torch.randn(len(asked), vocab_size) * spreads).to(dtype)
    case = Case(
        logits,
        [each for each, _, _ in asked],
        [t for _, t, _ in asked],
        uneven(vocab_size, ranks.size),
    )
    tokens = torch.tensor(tokens_of(ranks, case))
    kept = filter_twin(*case.on(torch.device("cpu")))
    # A token whose cumulative probability equals top_p to the last digits may fall on either side.
    assert kept.gather(1, tokens.long()[:, None]).sum() >= len(asked) - 1


def test_rows_without_filters_and_greedy_rows_are_left_alone(ranks: PeerRanks) -> None:
    filters = [(5, 0.5, 0.1), (0, 1.0, 0.0), (200, 1.0, 0.0), (3, 1.0, 0.0)]
    case = Case(torch.randn(4, 200), filters, [0.0, 1.0, 1.0, 1.0], uneven(200, ranks.size))
    *left, last = tokens_of(ranks, case)
    assert left == [-7, -7, -7]
    assert last >= 0


@pytest.mark.parametrize("num_equal", [3, 600])
def test_ties_at_the_cut_are_kept_across_ranks(ranks: PeerRanks, num_equal: int) -> None:
    """A rank sends none of 600 equal tokens: they are more than its slot takes, and the row is
    drawn in rounds."""
    logits = torch.full((6, 2000), -5.0)
    places = torch.linspace(0, 1999, num_equal).long()
    logits[:, places] = 1.0
    case = Case(logits, [(2, 0.999, 0.0)] * 6, [1.0] * 6, uneven(2000, ranks.size))
    tokens = tokens_of(ranks, case)
    assert set(tokens) <= set(places.tolist())
    assert len(set(tokens)) > 1


def test_draws_over_host_memory_are_those_of_one_process() -> None:
    """The cheapest case; the others run in `make test-long` and on GPUs."""
    case = Case(torch.randn(2, 100), [(5, 0.9, 0.0), (0, 0.8, 0.0)], [1.0, 0.7], uneven(100, 2))
    with peer_ranks(2, SLOT_BYTES, is_host=True) as ranks:
        assert min(tokens_of(ranks, case)) >= 0


def test_ranks_of_which_a_mask_leaves_nothing_take_no_part(ranks: PeerRanks) -> None:
    logits = torch.full((4, 900), float("-inf"))
    ends = uneven(900, ranks.size)
    for row in range(4):
        first = [0, *ends][row % ranks.size]
        logits[row, first : first + 6] = torch.randn(6)
    filters = [(4, 0.9, 0.0), (0, 0.9, 0.0), (300, 0.9, 0.0), (0, 1.0, 0.5)]
    tokens = tokens_of(ranks, Case(logits, filters, [1.0] * 4, ends))
    assert all(logits[row, token] > float("-inf") for row, token in enumerate(tokens))


@pytest.mark.parametrize("num_top", [pytest.param(0, marks=LONG_INTERPRETED), 5])
@pytest.mark.parametrize(
    "vocab_size",
    [300, pytest.param(9001, marks=pytest.mark.long), pytest.param(151_936, marks=GPU)],
)
def test_log_probabilities_are_to_the_bit_those_of_one_process(
    ranks: PeerRanks, vocab_size: int, num_top: int
) -> None:
    # Rounded coarsely, so that there are ties among the likeliest.
    logits = ((torch.randn(4, vocab_size) * 8).round() / 2).bfloat16()
    token_ids = torch.randint(0, vocab_size, (4,), dtype=torch.int32)
    token_ids[:3] = torch.tensor([0, vocab_size - 1, vocab_size // 9])
    expected = None
    for ends in (uneven(vocab_size, ranks.size), [*range(1, ranks.size), vocab_size]):
        case = Case(logits, [(0, 1.0, 0.0)] * 4, [1.0] * 4, ends)
        given = [[each] * ranks.size for each in (case, token_ids, num_top)]
        if expected is None:
            expected, *_ = ranks(scored, *given, [False] * ranks.size)
        for found in ranks(scored, *given, [True] * ranks.size):
            assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
