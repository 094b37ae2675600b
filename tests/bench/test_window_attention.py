from __future__ import annotations

import pytest

from headwater.bench.window_attention import KEY_TILE, NUM_Q_HEADS, tile_flops


@pytest.mark.parametrize(
    ("count", "start", "window", "num_tiles"),
    [
        # Tiles of 64 tokens: keys up to the last of them.
        pytest.param(128, 0, 0, 1 + 2, id="all keys"),
        pytest.param(128, 128, 0, 3 + 4, id="all keys behind others"),
        # The first of them still sees the 63 before it, and its own tile.
        pytest.param(128, 128, 64, 2 + 2, id="a window of a tile"),
        pytest.param(128, 128, 65, 2 + 2, id="a window of a key more"),
        pytest.param(128, 128, 66, 3 + 3, id="a window of two keys more"),
    ],
)
def test_operations_are_those_of_tiles_that_are_seen(
    count: int, start: int, window: int, num_tiles: int
) -> None:
    scores = num_tiles * 64 * KEY_TILE
    assert tile_flops(count, start, window, 64, 128) == 4 * scores * NUM_Q_HEADS * 128
