"""Memory of the KV cache of published shapes, as `headwater bench cache-bytes` measures it."""

from __future__ import annotations

import pytest

from headwater.bench.cache_bytes import measured
from headwater.bench.published_shapes import STATES, WINDOWS


@pytest.mark.parametrize("name", WINDOWS)
def test_a_sequence_of_32k_tokens_takes_a_quarter_where_layers_see_a_window(name: str) -> None:
    found = measured(name, WINDOWS[name], 32_768, is_cpu=False, block_size=16)
    assert set(found.sequence_bytes) == {"full", "window"}
    assert found.share_of_blocks <= 1 / 4


def test_states_are_a_fixed_part_of_a_sequence() -> None:
    shape = STATES["Qwen3.6-35B-A3B"]
    found = [measured("m", shape, n, is_cpu=False, block_size=16) for n in (2048, 8192)]
    short, long = (each.sequence_bytes for each in found)
    assert short["state"] == long["state"]
    assert long["full"] == 4 * short["full"]
