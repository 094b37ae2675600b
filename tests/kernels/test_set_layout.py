"""Where tails and pieces of states lie in the pages of a set."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headwater.kernels.states.set_layout import SetLayout, SetSizes

SIZES = [
    pytest.param(SetSizes(6, 256), 1000, id="tails alone"),
    pytest.param(SetSizes(3, 256, 12, 1024), 3 * 1024, id="pieces that fill pages"),
    pytest.param(SetSizes(6, 384, 24, 512), 1300, id="pieces behind tails"),
    pytest.param(SetSizes(5, 384, 1, 512), 4000, id="all behind tails"),
    pytest.param(SetSizes(4, 2048, 8, 4096), 512, id="larger than keys and values"),
]


@pytest.mark.parametrize(("sizes", "kv_bytes"), SIZES)
def test_no_two_of_a_set_share_a_byte(sizes: SetSizes, kv_bytes: int) -> None:
    layout = SetLayout.beside(sizes, kv_bytes, 16)
    places = [(layout.tail(i), sizes.tail_bytes) for i in range(sizes.num_tails)]
    places += [(layout.piece(i), sizes.piece_bytes) for i in range(sizes.num_pieces)]
    places.sort()
    for ((page, first), size), ((next_page, next_first), _) in pairwise(places):
        assert page < next_page or first + size <= next_first
    assert {page for (page, _), _ in places} == set(range(layout.num_pages))
    assert all(first + size <= layout.page_bytes for (_, first), size in places)
    assert layout.page_bytes >= kv_bytes


def test_a_page_grows_a_little_where_states_fill_it() -> None:
    """Two units of Qwen3.6-35B-A3B, a tail and four pieces each, miss a page of its keys and values
    in bfloat16 by 0.8 %."""
    sizes = SetSizes(480, 34_048, 480 * 4, 32_768)
    layout = SetLayout.beside(sizes, 327_680, 16)
    assert layout.page_bytes == 2 * (34_048 + 4 * 32_768) == 330_240
    assert layout.num_pages == 240


def test_a_page_grows_by_no_more_than_its_share() -> None:
    sizes = SetSizes(100, 1000, 100, 512)
    assert SetLayout.beside(sizes, 1440, 16).page_bytes == 1440
