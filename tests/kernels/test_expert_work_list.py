from __future__ import annotations

import pytest
import torch

from headwater.kernels.experts import work_list
from headwater.kernels.experts.work_list import list_tiles
from tests.kernels.paging import GPU


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "block_m", "align"),
    [
        (1, 2, 8, 16, 1),
        (41, 3, 6, 16, 8),
        pytest.param(20_000, 8, 512, 128, 64, marks=GPU),
        pytest.param(1111, 8, 128, 64, 1, marks=GPU),
        pytest.param(9000, 8, 160, 128, 64, marks=GPU),
    ],
)
@pytest.mark.parametrize("routing", ["any", "one", "some"])
def test_each_pair_has_one_row_in_a_tile_of_its_expert(
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    block_m: int,
    align: int,
    routing: str,
    generator: torch.Generator,
) -> None:
    check_list(num_tokens, num_chosen, num_experts, block_m, align, routing, generator)


@pytest.mark.parametrize("routing", ["any", "one"])
def test_pairs_in_segments_have_the_same_rows(
    routing: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_list, "MOST_AT_ONCE", 0)
    monkeypatch.setattr(work_list, "SEGMENT", 32)
    monkeypatch.setattr(work_list, "SEGMENTS_AT_ONCE", 2)
    check_list(41, 3, 11, 16, 8, routing, generator)


def check_list(
    num_tokens: int,
    num_chosen: int,
    num_experts: int,
    block_m: int,
    align: int,
    routing: str,
    generator: torch.Generator,
) -> None:
    most = {"any": num_experts, "one": 1, "some": num_experts // 2}[routing]
    shape = (num_tokens, num_chosen)
    experts = torch.randint(
        most, shape, generator=generator, device=generator.device, dtype=torch.int32
    )
    work = list_tiles(experts, num_experts, block_m=block_m, align=align)
    pairs = []
    for i in range(int(work.num_tiles)):
        expert, first, count = work.tiles[:, i].tolist()
        assert first % align == 0
        assert 0 < count <= block_m
        of_tile = work.pairs[first : first + count].tolist()
        assert set(experts.flatten()[of_tile].tolist()) == {expert}
        assert work.places[of_tile].tolist() == list(range(first, first + count))
        pairs += of_tile
    by_expert = sorted(range(experts.numel()), key=lambda i: (int(experts.flatten()[i]), i))
    assert pairs == by_expert
