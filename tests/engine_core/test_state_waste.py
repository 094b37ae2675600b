"""Bytes of the pool that hold nothing under mixed load, for published shapes with states."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.bench.cache_bytes import MIXED_LEN, limits_of, request_for, wasted_share
from headwater.bench.published_shapes import STATES
from headwater.engine_core.config import EngineConfig
from tests.long_values import long_but

MOST_WASTE = 0.04


def config_for(name: str, *, is_cpu: bool, **sizes: Any) -> EngineConfig:
    """`sizes`: see `request_for`."""
    return limits_of(request_for(STATES[name], MIXED_LEN, is_cpu=is_cpu, **sizes))


@pytest.mark.parametrize(
    "name",
    long_but(
        STATES,
        "Qwen3.6-35B-A3B",
        "Nemotron-3-Nano-30B-A3B",
        "Granite-4.0-H-Micro",
        "Falcon-H1-3B",
        "LFM2-1.2B",
    ),
)
def test_little_of_the_pool_is_wasted_under_mixed_load_on_a_gpu(name: str) -> None:
    assert wasted_share(config_for(name, is_cpu=False)) <= MOST_WASTE


@pytest.mark.parametrize(
    "name", long_but(STATES, "Qwen3.5-2B", "Falcon-H1-0.5B", "Nemotron-3-Nano-30B-A3B")
)
def test_little_of_the_pool_is_wasted_under_mixed_load_on_a_cpu(name: str) -> None:
    assert wasted_share(config_for(name, is_cpu=True)) <= MOST_WASTE


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("Qwen3.5-397B-A17B", 4),
        ("LFM2-8B-A1B", 4),
        pytest.param("Nemotron-3-Nano-30B-A3B", 2, marks=pytest.mark.long),
        pytest.param("Granite-4.0-H-350M", 2, marks=pytest.mark.long),
        pytest.param("Granite-4.0-H-Micro", 4, marks=pytest.mark.long),
        pytest.param("Nemotron-H-8B", 8, marks=pytest.mark.long),
    ],
)
def test_little_of_the_pool_is_wasted_where_ranks_on_cpus_have_few_key_heads(
    name: str, num_ranks: int
) -> None:
    assert wasted_share(config_for(name, is_cpu=True, num_ranks=num_ranks)) <= MOST_WASTE


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("Falcon-H1-7B", 2),
        pytest.param("Nemotron-3-Nano-30B-A3B", 2, marks=pytest.mark.long),
        pytest.param("Nemotron-H-47B", 8, marks=pytest.mark.long),
        pytest.param("Granite-4.0-H-Small", 8, marks=pytest.mark.long),
    ],
)
def test_little_of_the_pool_is_wasted_where_gpus_have_few_key_heads(
    name: str, num_ranks: int
) -> None:
    assert wasted_share(config_for(name, is_cpu=False, num_ranks=num_ranks)) <= MOST_WASTE


@pytest.mark.parametrize("name", long_but(STATES, "Falcon-H1-0.5B"))
def test_little_of_the_pool_is_wasted_beside_an_fp8_cache(name: str) -> None:
    assert wasted_share(config_for(name, is_cpu=False, kv_format="fp8")) <= MOST_WASTE


def test_the_log_says_what_pages_and_sets_pad() -> None:
    config = config_for("Qwen3.6-35B-A3B", is_cpu=False)
    described = config.page_sizes.described(config.page_kinds, config.state_pages)
    assert described == (
        "pages of 0.330 MB: full pads 0.8% of its pages, state sets of 79.3 MB pad 0.0%"
    )
