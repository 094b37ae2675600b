from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headwater.bench.agent_sessions import SHORT as AGENTS
from headwater.bench.agent_sessions import scaled
from headwater.bench.index_events import measure
from headwater.engine_core.config import BY_VALUE, LRU
from tests.simulation.policy_replay import LADDER_BLOCKS, OURS, Outcome, replay
from tests.simulation.routing_policies import RULES
from tests.simulation.routing_traces import BLOCK_SIZE, agents, conversation, ladder
from tests.simulation.simulated_replica import Hardware
from tests.simulation.virtual_loop import Stuck, run_virtually

SHORT = ((15, 20), (20, 20))


def outcome(policy: str, seed: int = 0, stages: tuple[tuple[int, int], ...] = SHORT) -> Outcome:
    hardware = Hardware(num_blocks=LADDER_BLOCKS)
    return run_virtually(replay(ladder(seed, stages), policy, "ladder", hardware), seed)


@pytest.mark.long
def test_our_policy_finds_as_much_cached_as_any_and_answers_as_soon() -> None:
    ours = outcome(OURS)
    # The others are many times worse, and take many times longer for it.
    for rule in RULES.keys() - {"round robin", "least requests", "consistent hash"}:
        theirs = outcome(rule)
        assert ours.hit_rate >= 0.97 * theirs.hit_rate
        assert ours.ttft_mean <= 1.05 * theirs.ttft_mean
        assert ours.ttft_p90 <= 1.05 * theirs.ttft_p90


@pytest.mark.long
def test_agents_are_served_sooner_by_value_and_with_what_a_prompt_evicts() -> None:
    def by(eviction: str, *, reports_eviction_cost: bool = True) -> Outcome:
        hardware = Hardware(
            num_blocks=800,
            prefill_tps=60_000,
            itl_seconds=0.012,
            eviction=eviction,
            reports_eviction_cost=reports_eviction_cost,
        )
        arrivals = agents(scaled(AGENTS, 0.5), seed=1)
        return run_virtually(replay(arrivals, OURS, "agents", hardware, num_replicas=4), 1)

    lru = by(LRU)
    value = by(BY_VALUE, reports_eviction_cost=False)
    routed = by(BY_VALUE)
    assert value.hit_rate > 1.03 * lru.hit_rate
    assert value.ttft_mean < 0.95 * lru.ttft_mean
    assert routed.hit_rate > value.hit_rate
    assert routed.ttft_mean < value.ttft_mean


def test_a_seed_replays_exactly_and_another_one_does_not() -> None:
    one, again, other = (outcome(OURS, seed, ((15, 5),)) for seed in (1, 1, 2))
    assert one == again
    assert one.ttfts != other.ttfts


def test_a_trace_is_read_block_by_block_without_the_part_of_a_block_at_its_end(
    tmp_path: Path,
) -> None:
    lines = [
        {
            "timestamp": 0,
            "input_length": 2 * BLOCK_SIZE + 1,
            "output_length": 9,
            "hash_ids": [1, 2, 3],
        },
        {
            "timestamp": 2500,
            "input_length": 3 * BLOCK_SIZE,
            "output_length": 5,
            "hash_ids": [1, 2, 4],
        },
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second = conversation(tmp_path / "trace.jsonl")
    assert (len(first.hashes), len(second.hashes)) == (2, 3)
    assert first.hashes == second.hashes[:2]
    assert (second.at, second.num_output_tokens) == (2.5, 5)


def test_the_ladder_is_the_published_one() -> None:
    arrivals = ladder(0)
    assert arrivals[-1].at < sum(seconds for _, seconds in ((15, 50), (3, 20))) + 10 * 60
    assert {each.num_prompt_tokens for each in arrivals} == {7200}
    assert len({each.hashes[0] for each in arrivals}) == 150
    assert len({each.hashes[-1] for each in arrivals}) == 750


def test_virtual_time_passes_only_while_nothing_is_to_be_done_and_a_deadlock_is_seen() -> None:
    async def sleeps() -> float:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*(asyncio.sleep(3600) for _ in range(10)))
        return asyncio.get_running_loop().time() - start

    assert run_virtually(sleeps(), 0) == pytest.approx(3600)
    with pytest.raises(Stuck):
        run_virtually(asyncio.Event().wait(), 0)


def test_an_index_takes_in_what_its_replicas_say() -> None:
    reported = measure(num_replicas=10, num_blocks=4000, decisions=5)
    assert reported["index_blocks"] == 4000
    assert reported["blocks_a_second_of_cpu"] > 0
