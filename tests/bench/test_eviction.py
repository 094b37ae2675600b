"""Orders of eviction on drawn traces, in small: what the drawn sessions are like, and what each
order finds."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from headwater.bench.agent_sessions import (
    BLOCK,
    LOADS,
    LONG,
    SHORT,
    AgentLoad,
    draw_sessions,
    scaled,
    write_trace,
)
from headwater.bench.cache_replay import (
    BeladyCache,
    PoolCache,
    Prefill,
    Replayed,
    full_blocks,
    replay,
    turn_of,
)
from headwater.bench.eviction import compare
from headwater.bench.trace_file import read_trace
from headwater.engine_core.kv.value.turn import UNKNOWN


@pytest.mark.parametrize(
    ("load", "median", "p90", "p99"),
    [pytest.param(LONG, 2.0, 24, 684, id="long"), pytest.param(SHORT, 5.2, None, 81, id="short")],
)
def test_gaps_are_a_mixture_with_the_published_quantiles(
    load: AgentLoad, median: float, p90: float | None, p99: float
) -> None:
    def share_above(seconds: float) -> float:
        total = sum(gap.weight for gap in load.gaps)
        return sum(gap.weight * gap.seconds.survival(seconds) for gap in load.gaps) / total

    assert share_above(median) == pytest.approx(0.5, abs=0.02)
    assert p90 is None or share_above(p90) == pytest.approx(0.1, abs=0.01)
    assert share_above(p99) == pytest.approx(0.01, abs=0.001)


@pytest.mark.parametrize("name", LOADS)
def test_prompts_of_agents_are_nearly_all_read_before(name: str) -> None:
    records = draw_sessions(scaled(LOADS[name], 0.2), seed=3)
    known = set[int]()
    num_hits = 0
    for record in records:
        num_hits += sum(hash_id in known for hash_id in full_blocks(record))
        known.update(record.hash_ids)
    assert 0.93 <= num_hits * BLOCK / sum(record.input_length for record in records) <= 0.97


def test_sub_agents_of_a_group_share_a_prefix_and_begin_together() -> None:
    records = draw_sessions(scaled(LONG, 0.05), seed=0)
    firsts = {record.session: record for record in reversed(records) if "." in record.session}
    groups: dict[str, list[str]] = {}
    for session in firsts:
        groups.setdefault(session.rpartition(".")[0], []).append(session)
    assert max(map(len, groups.values())) >= 7
    for members in groups.values():
        times = [firsts[each].timestamp for each in members]
        assert max(times) - min(times) < 500
        for one, other in combinations(members[:3], 2):
            common = [
                a == b for a, b in zip(firsts[one].hash_ids, firsts[other].hash_ids, strict=False)
            ].index(False)
            assert common * BLOCK >= LONG.sub_system


def test_a_seed_draws_the_same_trace_which_a_file_keeps(tmp_path: Path) -> None:
    load = scaled(SHORT, 0.02)
    records = draw_sessions(load, seed=1)
    assert records == draw_sessions(load, seed=1)
    assert records != draw_sessions(load, seed=2)
    write_trace(tmp_path / "trace.jsonl", records)
    read = read_trace(tmp_path / "trace.jsonl")
    assert [(each.timestamp, each.hash_ids) for each in read] == [
        (each.timestamp, each.hash_ids) for each in records
    ]


def best_hits(trace: list[list[int]], room: int, cached: frozenset[tuple[int, ...]]) -> int:
    """Most blocks that any order of eviction finds; a block is named by its chain."""
    if not trace:
        return 0
    chains = [tuple(trace[0][: end + 1]) for end in range(len(trace[0]))]
    num_hits = 0
    while num_hits < len(chains) and chains[num_hits] in cached:
        num_hits += 1
    after = cached | set(chains)
    kept = [frozenset(each) for each in combinations(sorted(after), min(room, len(after)))]
    return num_hits + max(best_hits(trace[1:], room, each) for each in kept)


@pytest.mark.parametrize("seed", range(8))
def test_beladys_order_finds_what_the_best_of_all_orders_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Chains over a tree: block 10 a + b follows block a.
    trace = [[int(a), int(10 * a + b)] for a, b in rng.integers(1, 4, (7, 2))]
    cache = BeladyCache(3, trace)
    num_hits = sum(cache.serve(ids, 0.0, UNKNOWN) for ids in trace)
    assert num_hits == best_hits(trace, 3, frozenset())


@pytest.mark.parametrize(
    ("factor", "memories"),
    [
        pytest.param(0.12, [0.15], id="few"),
        pytest.param(1.0, [0.05, 0.15, 0.4], id="all", marks=pytest.mark.long),
    ],
)
def test_value_finds_more_than_lru_and_nearly_what_the_informed_order_finds(
    factor: float, memories: list[float]
) -> None:
    load = scaled(SHORT, factor)
    others = [draw_sessions(load, seed) for seed in (1, 2)]
    outcomes = compare("short", draw_sessions(load, seed=0), others, 0.9, memories)
    hits = {(each.memory_percent, each.policy): each.hit_percent for each in outcomes}
    for memory in (100 * each for each in memories):
        assert hits[memory, "value"] >= 0.99 * hits[memory, "lru"]
        assert hits[memory, "value"] >= 0.95 * hits[memory, "informed"]
        assert hits[memory, "value"] <= hits[memory, "belady"]
    assert hits[15.0, "value"] >= 1.2 * hits[15.0, "lru"]


def test_a_replay_has_the_same_victims_each_time() -> None:
    records = draw_sessions(scaled(SHORT, 0.05), seed=0)
    prefill = Prefill()
    runs = [
        replay(records, PoolCache(300, prefill.costs), prefill, turn_of).prefills for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("aging", "seconds"),
    [
        pytest.param(None, [4.0, 6.0, 5.5, 2.0], id="in order of arrival"),
        pytest.param(0.2, [4.0, 6.5, 2.5, 2.0], id="the shortest first"),
        pytest.param(3.0, [4.0, 6.0, 5.5, 2.0], id="who has waited long before who is short"),
    ],
)
def test_first_tokens_wait_for_the_prompts_before_them(
    aging: float | None, seconds: list[float]
) -> None:
    found = Replayed(arrivals=[0.0, 1.0, 2.0, 10.0], prefills=[8.0, 6.0, 1.0, 4.0])
    assert found.first_token_seconds(2.0, aging).tolist() == seconds
