"""What leaves the device for host memory and when it comes back, one fact at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.bench.workloads import TINY
from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import SwapPlan
from headwater.engine_core.executors.build import build_executor
from headwater.engine_core.executors.options import ExecutorOptions
from headwater.engine_core.executors.simulated import (
    SimulatedExecutor,
    SimulatedModel,
    SimulatedTiming,
    expected_tokens,
)
from headwater.engine_core.kv.block_pool import BlockPool
from headwater.engine_core.kv.host_tier import HostTier
from headwater.engine_core.kv.prefix_cache import HashChain, PrefixCache
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams

BLOCK_SIZE = 16
MODEL = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    num_blocks=17,
    num_host_blocks=64,
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=BLOCK_SIZE,
)


class Tier:
    """A host tier beside a pool that sequences come and go in."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.host = HostTier(self.pool, num_slots)
        self.cache = PrefixCache(self.pool)

    def compute(self, first_token: int, num_blocks: int) -> HashChain:
        """A sequence that comes, hits what the device has, computes the rest and leaves."""
        chain = chain_of(first_token, num_blocks)
        hits = self.cache.match(chain, num_blocks)
        self.pool.share(hits)
        chain.num_cached = len(hits)
        blocks = self.pool.allocate(num_blocks - len(hits))
        self.cache.announce(self.cache.offer(chain, blocks))
        self.host.release(hits + blocks)
        return chain

    def copies(self) -> SwapPlan:
        plan = self.host.take_plan()
        assert plan is not None
        return plan


def chain_of(first_token: int, num_blocks: int) -> HashChain:
    chain = HashChain(b"n" * 16)
    chain.cover(np.arange(first_token, first_token + num_blocks * BLOCK_SIZE, dtype=np.int32), BLOCK_SIZE)
    return chain


def test_what_nobody_holds_is_copied_once_and_what_somebody_holds_is_not() -> None:
    tier = Tier(9, 8)
    chain = chain_of(0, 3)
    blocks = tier.pool.allocate(3)
    tier.cache.offer(chain, blocks)
    tier.pool.share(blocks[:1])
    tier.host.release(blocks)
    plan = tier.copies()
    assert (plan.out_blocks.tolist(), plan.out_slots.tolist()) == (blocks[1:], [0, 1])
    tier.host.release(blocks[:1])
    assert tier.copies().out_blocks.tolist() == blocks[:1]
    tier.pool.share(blocks)
    tier.host.release(blocks)
    assert tier.host.take_plan() is None


def test_where_slots_are_few_the_first_blocks_of_the_last_sequence_are_kept() -> None:
    tier = Tier(17, 3)
    old, new = tier.compute(0, 2), tier.compute(1000, 5)
    assert tier.host.find(new, 0, 5) == [0, 1, 2]
    assert tier.host.find(old, 0, 2) == []


def test_the_tail_of_what_was_used_least_recently_goes_first() -> None:
    tier = Tier(17, 5)
    first, second = tier.compute(0, 2), tier.compute(1000, 2)
    held = tier.cache.match(first, 2)
    tier.pool.share(held)
    tier.host.release(held)
    tier.compute(2000, 2)
    assert len(tier.host.find(first, 0, 2)) == 2
    assert len(tier.host.find(second, 0, 2)) == 1


def test_a_hash_is_told_lost_when_neither_has_it_and_stored_when_neither_had() -> None:
    tier = Tier(5, 4)
    first = tier.compute(0, 4)
    second = tier.compute(1000, 2)
    events = tier.cache.take_events()
    assert events is not None
    assert [chain.hashes for chain in events.stored] == [first.hashes, second.hashes]
    # The device lost the two last of the first, and so did host memory, to the second.
    assert sorted(events.removed) == sorted(first.hashes[2:])
    assert set(tier.pool.cached_hashes()) == {*first.hashes[:2], *second.hashes}
    # The device forgets all of it and computes some anew, while host memory has it: nobody learns anything.
    tier.pool.release(tier.pool.allocate(4))
    assert tier.cache.match(second, 2) == []
    tier.compute(1000, 2)
    assert tier.cache.take_events() is None


def test_blocks_on_their_way_back_are_held_and_then_hit_by_anyone() -> None:
    tier = Tier(5, 8)
    chain = tier.compute(0, 3)
    slots = tier.host.find(chain, 0, 3)
    tier.compute(1000, 4)
    tier.copies()
    assert tier.cache.match(chain, 3) == []
    ticket = tier.host.load(chain, [], slots)
    plan = tier.copies()
    assert plan.in_slots.tolist() == slots
    assert (tier.pool.num_free, tier.host.is_loading) == (1, True)
    assert tier.host.ticket(chain.hashes[0]) == ticket
    assert tier.host.find(chain, 0, 3) == [], "nobody fetches them twice"
    assert not tier.host.finish_loads(ticket - 1)
    assert tier.host.finish_loads(ticket)
    assert tier.cache.match(chain, 3) == plan.in_blocks.tolist()
    assert (tier.pool.num_free, tier.host.is_loading) == (4, False)


def test_slots_that_are_read_are_not_given_away() -> None:
    tier = Tier(9, 3)
    chain = tier.compute(0, 2)
    first = tier.compute(500, 1)
    slots = tier.host.find(chain, 0, 2)
    tier.pool.allocate(5)
    ticket = tier.host.load(chain, [], slots)
    other = tier.compute(2000, 1)
    assert (len(tier.host.find(other, 0, 1)), len(tier.host.find(first, 0, 1))) == (1, 0)
    assert tier.host.finish_loads(ticket)
    assert tier.host.find(chain, 0, 2) == slots


def test_a_sequence_that_is_longer_than_host_memory_keeps_its_beginning() -> None:
    tier = Tier(17, 4)
    for num_blocks in (4, 5, 8, 8):
        chain = tier.compute(0, num_blocks)
        assert tier.host.find(chain, 0, 8) == [0, 1, 2, 3]


def test_what_a_load_holds_is_copied_when_it_alone_held_it() -> None:
    tier = Tier(9, 8)
    whole = tier.compute(0, 4)
    tier.copies()
    tier.pool.release(tier.pool.allocate(8))
    chain = chain_of(0, 4)
    held = tier.pool.allocate(2)
    tier.cache.offer(chain, held)
    del tier.host._slot_of[chain.hashes[0]]
    ticket = tier.host.load(chain, held, tier.host.find(chain, 2, 4))
    tier.host.release(held)
    assert tier.copies().out_blocks.size == 0
    tier.host.finish_loads(ticket)
    assert tier.copies().out_blocks.tolist() == held[:1]
    assert len(tier.host.find(whole, 0, 4)) == 4


# Through an engine.


class Bench:
    def __init__(self, late_polls: int = 3, **changes: Any) -> None:
        config = replace(CONFIG, **changes)
        self.executor = SimulatedExecutor(config, MODEL, SimulatedTiming(late_polls=late_polls), verify_every=1)
        self.engine = Engine(config, self.executor)
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def add(self, key: int, first_token: int, num_tokens: int = 200, max_tokens: int = 8) -> None:
        self.tokens[key] = []
        prompt_ids = prompt(first_token, num_tokens)
        sampling = SamplingParams(seed=key, max_tokens=max_tokens)
        self.engine.add(NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling))

    def step(self) -> None:
        if (output := self.engine.step()) is None:
            return
        at = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[key] += output.token_ids[at : at + count]
            at += count
        self.cached |= {start.key: start.cached_tokens for start in output.starts}

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("it does not end")


def prompt(first_token: int, num_tokens: int) -> list[int]:
    return [(first_token + 7 * i) % 1000 for i in range(num_tokens)]


def expected(key: int, first_token: int, max_tokens: int = 8) -> list[int]:
    return expected_tokens(MODEL, prompt(first_token, 200), SamplingParams(seed=key, max_tokens=max_tokens))


def test_a_prompt_that_the_device_forgot_comes_back_with_the_same_answer() -> None:
    bench = Bench()
    for key, first_token in enumerate((0, 300, 600, 0)):
        bench.add(key, first_token)
        bench.run()
    assert bench.cached == {0: 0, 1: 0, 2: 0, 3: 192}
    assert bench.tokens[3] == expected(3, 0)
    load = bench.engine.load()
    assert load.num_swapped_in == 192
    assert load.num_swapped_out == 3 * 192
    assert (load.num_used_blocks, load.num_used_host_blocks, load.num_total_host_blocks) == (0, 36, 64)


def test_without_host_memory_it_is_computed_again() -> None:
    bench = Bench(num_host_blocks=0)
    for key, first_token in enumerate((0, 300, 600, 0)):
        bench.add(key, first_token)
        bench.run()
    assert bench.cached[3] == 0


def test_others_decode_while_blocks_come_back_and_two_of_one_prefix_fetch_it_once() -> None:
    bench = Bench(num_blocks=65, num_host_blocks=80)
    for key in range(6):
        bench.add(key, 101 * key)
        bench.run()
    bench.add(7, 900, max_tokens=50)
    while not bench.tokens[7]:
        bench.step()
    bench.add(8, 0)
    bench.add(9, 0)
    said = len(bench.tokens[7])
    while not bench.tokens[8]:
        bench.step()
    assert len(bench.tokens[7]) > said + 5
    bench.run()
    assert (bench.cached[8], bench.cached[9]) == (192, 192)
    assert bench.engine.load().num_swapped_in == 192
    assert (bench.tokens[8], bench.tokens[9]) == (expected(8, 0), expected(9, 0))


def test_one_that_leaves_while_its_blocks_come_back_leaves_nothing_held() -> None:
    bench = Bench()
    for key, first_token in enumerate((0, 300)):
        bench.add(key, first_token)
        bench.run()
    bench.add(2, 0)
    bench.step()
    bench.engine.cancel(2)
    bench.run()
    load = bench.engine.load()
    assert (load.num_used_blocks, load.num_waiting, bench.tokens[2]) == (0, 0, [])
    assert load.num_swapped_in > 0
    # What came is there for the next.
    bench.add(3, 0)
    bench.run()
    assert (bench.cached[3], bench.engine.load().num_swapped_in) == (192, load.num_swapped_in)


def test_an_engine_that_only_waits_for_blocks_says_so() -> None:
    bench = Bench(late_polls=1000)
    for key, first_token in enumerate((0, 300)):
        bench.add(key, first_token)
        bench.run()
    bench.add(2, 0)
    bench.step()
    assert bench.engine.has_work()
    assert bench.engine.holds_back


def test_a_cpu_has_no_other_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ExecutorOptions(model_folder=tmp_path, device="cpu", load_format="dummy", kv_swap_memory=1 << 20)
    with pytest.raises(ConfigError, match="kv_swap_memory is 1048576; allowed: 0 on the platform cpu"):
        build_executor(options, lambda phase, done, total: None)


def test_fewer_slots_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks is -1; allowed: 0 or more"):
        replace(CONFIG, num_host_blocks=-1)
